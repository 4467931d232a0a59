"""A server killed at each record of an optimizer step without pre-images: its rank is rolled forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import proxied
import pytest
from native_reference import native_reference
from running_proxyd import running_proxyd

pytestmark = pytest.mark.drawn(5)

PHASE_RECORDS = 10
"""More than an optimizer step has here."""
FIRST, APART = 60, 50
"""Minibatches: the first one struck, and from one to the next.  By then replicas are known (again), as a
rule; before, everything is shadowed, and the step is computed again.
"""
STEPS = FIRST + APART * PHASE_RECORDS
SCRIPT = proxied.WORKLOADS / "optimizer_steps.py"
ROLL_FORWARD, REPLICA, SNAPSHOT = "roll-forward", "restart-copy-replay", "restore-snapshot-replay"
PARKED_INSIDE = "stood inside its optimizer step"
"""The other rank, on a busy machine: there is nothing to roll forward to then."""


class Training:
    """Runs of the script by one proxyd that keeps no pre-images in optimizer steps."""

    def __init__(self, folder: Path, socket: Path) -> None:
        self._folder, self.socket = folder, str(socket)
        self._runs = 0
        self.undisturbed, self.report = self.run()

    def run(self, *words: str, drills: Sequence[str] = ()) -> tuple[list[str], Any]:
        """What both ranks wrote, and the report."""
        self._runs += 1
        out = self._folder / str(self._runs)
        ended = proxied.run(
            proxied.ranks(2, SCRIPT, "--steps", str(STEPS), "--out", str(out), *words),
            folder=self._folder, options=("--socket", self.socket, *drills),
        )  # fmt: skip
        assert ended.status == 0, ended.output[:3000] + ended.output[-2000:]
        assert ended.report["replies_different"] == 0
        return [out.with_suffix(f".{rank}").read_text() for rank in (0, 1)], ended.report


def kills(calls: int, count: int) -> list[str]:
    """The last records of a minibatch, the commit included, each in another minibatch."""
    points = [
        f"kill-server rank={back % 2} step={FIRST + APART * back} call={calls - back}"
        for back in range(count)
    ]
    return [word for point in points for word in ("--drill", point)]


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """With the values of an undisturbed run; a step that looks inside computes the same."""
    folder = tmp_path_factory.mktemp("training")
    with running_proxyd(folder / "socket", 2, ("--optimizer-preimages", "off")) as daemon:
        yield Training(folder, daemon.socket)


def test_a_server_killed_at_each_record_of_the_step_is_rolled_forward_and_no_bit_differs(
    training: Training,
) -> None:
    drills = kills(training.report["calls_per_step"], PHASE_RECORDS)
    written, report = training.run(drills=drills)
    assert written == training.undisturbed
    recoveries = report["recoveries"]
    assert len(recoveries) == PHASE_RECORDS and all(r["recovered"] for r in recoveries)
    plans = Counter((r["phase"], r["plan"]) for r in recoveries)
    print(plans)
    others = [r for r in recoveries if r["phase"] == "OPTIMIZER" and r["plan"] not in (ROLL_FORWARD, REPLICA)]
    assert all(PARKED_INSIDE in r["reason"] for r in others), others
    assert any(phase == "FORWARD_BACKWARD" for phase, _ in plans), "no kill lies before the step"
    assert plans["OPTIMIZER", ROLL_FORWARD]  # how many depends on how fast the other rank is parked


def test_a_step_that_tells_a_value_of_its_own_falls_back_to_the_snapshot_and_no_bit_differs(
    training: Training,
) -> None:
    looks = 2  # records more: a sum, and its value
    drills = kills(training.report["calls_per_step"] + looks, 6)
    written, report = training.run("--looks-inside", drills=drills)
    assert written == training.undisturbed
    recoveries = report["recoveries"]
    assert len(recoveries) == 6 and all(r["recovered"] for r in recoveries)
    print(Counter((r["phase"], r["plan"]) for r in recoveries))
    fallen = [r["reason"] for r in recoveries if r["plan"] == SNAPSHOT]
    refused = [reason for reason in fallen if "tried before: roll-forward" in reason]
    assert refused, fallen
    others = [reason for reason in fallen if reason not in refused]
    assert all(PARKED_INSIDE in reason for reason in others), others


def test_a_step_in_which_one_rank_alone_does_something_is_not_taken_from_its_replica(
    training: Training, tmp_path: Path
) -> None:
    """Findings C4b: a statistic that nothing else depends on, so that no other sign would tell."""
    script, first, apart, times, calls = proxied.WORKLOADS / "odd" / "steps_that_part.py", 60, 40, 6, 25
    points = [f"kill-server rank=1 step={first + apart * time} call={calls - time}" for time in range(times)]
    drills = [word for point in points for word in ("--drill", point)]
    command = proxied.ranks(2, script, str(tmp_path))
    ended = proxied.run(command, folder=tmp_path, options=("--socket", training.socket, *drills))
    assert ended.status == 0, ended.output[-3000:]
    native = native_reference(lambda folder: proxied.ranks(2, script, str(folder)))
    for rank in "01":
        assert (tmp_path / rank).read_text() == (native / rank).read_text()
    print(Counter(recovery["plan"] for recovery in ended.report["recoveries"]))
    assert len(ended.report["recoveries"]) == times
