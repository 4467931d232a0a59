"""Device servers that die at exact records: the losses are those of an undisturbed run, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path

import proxied
import pytest
from test_training import EXAMPLES
from training_run import driver

from understudy.recovery.run.conclusion import DRILL_NEVER_FIRED

KILLS = 44
FIRST = 4  # the first minibatch to be struck: shapes are learnt, replicas known


def spread(calls_per_step: int, seed: int) -> list[int]:
    """At least 40 call indices over one minibatch, the same for a seed: evenly spaced, then shuffled."""
    calls = sorted({1 + round(i * (calls_per_step - 1) / (KILLS - 1)) for i in range(KILLS)})
    random.Random(seed).shuffle(calls)
    return calls


@pytest.mark.long
@pytest.mark.parametrize("example", EXAMPLES)
def test_a_server_killed_at_each_of_forty_calls_of_a_minibatch_changes_no_loss(
    example: str, tmp_path: Path
) -> None:
    """Each kill strikes another minibatch of one run, at another call: a wrong bit would stay to the end.

    A sample of such calls, in three other models, is always struck: tests/recovery/test_sweep.py.
    """
    seed = 20261121
    print(f"seed {seed}")
    steps = FIRST + 2 * KILLS + 2
    training = EXAMPLES[example](2, steps, 0.1)
    unfaulted = training.run(tmp_path / "unfaulted", proxied=True)
    calls = spread(unfaulted.report["calls_per_step"], seed)
    assert len(calls) >= 40
    # Every second minibatch: a rank may run into the next one before its peer is back, and two deaths at
    # once would leave no replica.
    drills = tuple(
        f"kill-server rank={i % 2} step={FIRST + 2 * i} call={call}" for i, call in enumerate(calls)
    )
    faulted = training.run(tmp_path / "faulted", proxied=True, drills=drills)
    assert faulted.losses == unfaulted.losses
    recoveries = faulted.report["recoveries"]
    assert len(recoveries) == len(calls)
    assert all(r["recovered"] and r["plan"] == "restart-copy-replay" for r in recoveries)
    assert {r["phase"] for r in recoveries} == {"FORWARD_BACKWARD", "OPTIMIZER"}
    assert faulted.report["replies_different"] == 0


def test_a_drill_that_never_fires_is_named_and_is_an_error(tmp_path: Path) -> None:
    script = proxied.WORKLOADS / "tiny.py"
    ended = proxied.run(
        proxied.python(script), folder=tmp_path, options=("--drill", "kill-server rank=0 step=9999 call=1")
    )
    assert ended.status == DRILL_NEVER_FIRED
    assert "kill-server rank=0 step=9999 call=1" in ended.output and "never fired" in ended.output
    assert [f["fired"] for f in ended.report["faults"]] == [False]


@pytest.mark.long
def test_three_ranks_survive_the_death_of_any_of_them(tmp_path: Path) -> None:
    """With three ranks one waits for a peer that lives: it must be got out of that wait, too.

    Always run: three ranks without PyTorch (tests/recovery/test_proxyd_recovery.py), four
    (tests/scripts/test_parallelism.py).
    """
    training = EXAMPLES["char_gpt"](3, 24, 0.1)
    unfaulted = training.run(tmp_path / "unfaulted", proxied=True)
    drills = tuple(
        f"kill-server rank={i % 3} step={5 + 3 * i} call={[90, 130, 170, 40, 200][i]}" for i in range(5)
    )
    faulted = training.run(tmp_path / "faulted", proxied=True, drills=drills)
    assert faulted.losses == unfaulted.losses
    recoveries = faulted.report["recoveries"]
    assert [r["plan"] for r in recoveries] == ["restart-copy-replay"] * 5
    assert max(r["total_s"] - r["replay_s"] for r in recoveries) < 10, "somebody was not woken from a wait"


def test_every_kind_of_fault_and_kills_before_the_first_commit_change_no_loss(tmp_path: Path) -> None:
    """Each strikes another minibatch of one run; dropout is on, so generators matter too."""
    early = ("kill-server rank=1 step=1 call=30", "kill-server rank=0 step=2 call=30")
    plans = {
        "stop-server": "restart-copy-replay",
        "call-error": "rewind-in-place",
        "sticky-error": "restart-copy-replay",
        "driver-suspect": "stash-restart-restore",
        "collective-hang": "rewind-in-place",
        "network-partition": "rewind-in-place",
    }
    struck = [(kind, part) for part in (0.2, 0.6, 0.95) for kind in plans]
    # A GPU's server runs ahead of a collective that hangs: two faults a step apart could be one recovery.
    apart = 2 if driver() == "cpu" else 3
    training = EXAMPLES["char_gpt"](2, FIRST + apart * len(struck) + 2, 0.1)
    unfaulted = training.run(tmp_path / "unfaulted", proxied=True)
    calls = unfaulted.report["calls_per_step"]
    drills = tuple(
        f"{kind} rank={i % 2} step={FIRST + apart * i} call={1 + int(part * calls)}"
        for i, (kind, part) in enumerate(struck)
    )
    faulted = training.run(tmp_path / "faulted", proxied=True, drills=early + drills)
    assert faulted.losses == unfaulted.losses
    assert faulted.report["replies_different"] == 0
    recoveries = faulted.report["recoveries"]
    assert [r["fault"] for r in recoveries[:2]] == ["server-died"] * 2
    assert [r["plan"] for r in recoveries[2:]] == [plans[kind] for kind, _ in struck]
    assert all(r["recovered"] and r["verified"].startswith("every rank is back") for r in recoveries)
    assert {r["phase"] for r in recoveries} == {"FORWARD_BACKWARD", "OPTIMIZER"}
    latencies = {
        r["fault"]: max(o["detect_s"] for o in recoveries if o["fault"] == r["fault"]) for r in recoveries
    }
    print(f"noticed after at most {latencies} s")
    step_s = max(max(seconds[5:]) for seconds in unfaulted.seconds)
    assert latencies["server-stopped"] <= max(1, 5 * step_s)
    assert latencies["call-failed"] <= 0.25
