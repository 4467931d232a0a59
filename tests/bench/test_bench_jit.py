"""`make bench-jit`: what it reads off stamps, when it refuses, what it reports, and that it runs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import fault_plan
import fault_runs
import jit_cost
import jit_report
import pytest
import recovery_parts
from fault_plan import EVERY, KINDS, Fault
from jit_results import Results
from recovery_parts import PARTS, Unexpected
from steady_cost import AIM, Spread, cost_of
from steady_plan import PATTERN
from training_run import RunFailed

from understudy.campaigns.results.stamps import Recorder, Stamp, of_lines, of_ranks

FAULT = Fault("kill", 1, 17)
AT = 1000.0
"""When it happens."""
STAGES = {"imports": 2.0, "group": 0.1, "model": 1.0, "chosen": 0.3, "loaded": 0.05}
IDLE = 0.004
"""Seconds between two parts."""
MACHINE = {"date": "2026-01-01T00:00:00+00:00", "commit": "abc1234", "cpu": "a processor", "cores": 2,
           "load_before": 0.1, "load_after": 0.2, "torch": "2", "python": "3"}  # fmt: skip


def job(first: int, jit: bool = True) -> list[Stamp]:
    """A job whose rank 1 is killed behind 17 steps, and which goes on with step `first`.

    Rank 1 is later than rank 0 by 0.02 s at each end.
    """
    found = [Stamp("fault", AT, AT, 1, 0, FAULT.behind, FAULT.kind)]
    found += [Stamp("step", AT - 2 + step / 10, AT - 1.9 + step / 10, rank, 0, step, f"{step:08x}")
              for step in range(1, FAULT.behind + 1) for rank in range(2)]  # fmt: skip
    found.append(Stamp("noticed", AT + 0.01, AT + 0.01, 0, 0, note="RuntimeError"))
    if jit:
        found.append(Stamp("saved", AT + 0.011, AT + 0.05, 0, step=FAULT.behind, note="RuntimeError: …"))
    found.append(Stamp("launcher notices", AT + 0.1, AT + 0.1))
    found.append(Stamp("launcher has ended all", AT + 0.3, AT + 0.3))
    found += [Stamp("began", AT + 0.5 + rank / 50, AT + 0.5 + rank / 50, rank, 1) for rank in range(2)]
    now = AT + 0.52
    for name, seconds in STAGES.items():
        now += IDLE
        found += [Stamp(name, now, now + seconds - (1 - rank) / 50, rank, 1) for rank in range(2)]
        now += seconds
    for step in range(first, FAULT.behind + 3):
        found += [
            Stamp("step", now, now + 0.08 + rank / 50, rank, 1, step, f"{step:08x}") for rank in range(2)
        ]
        now += 0.1
    return found


def test_parts_of_a_recovery_and_what_is_not_accounted_for_are_its_total() -> None:
    (found,) = recovery_parts.recoveries(job(first=18), [FAULT])
    assert found.parts.keys() == PARTS.keys() - {"redone"} and list(found.parts) == [*PARTS][:-1]
    assert found.total == pytest.approx(0.52 + sum(STAGES.values()) + len(STAGES) * IDLE + 0.1)
    assert found.unaccounted == pytest.approx(len(STAGES) * IDLE + 0.001)
    assert sum(found.parts.values()) + found.unaccounted == pytest.approx(found.total)
    assert found.parts["noticed"] == pytest.approx(0.01) and found.parts["saved"] == pytest.approx(0.039)
    assert found.parts["ended"] == pytest.approx(0.25) and found.parts["launched"] == pytest.approx(0.22)
    assert found.parts["imports"] == pytest.approx(2.0), "a part ends when the last rank has come to its end"
    assert (found.redone, found.noticed_by) == (0, "another rank")


def test_steps_behind_an_older_checkpoint_are_counted_and_are_no_new_steps() -> None:
    (found,) = recovery_parts.recoveries(job(first=11, jit=False), [FAULT])
    assert found.redone == 7 and "saved" not in found.parts
    assert found.parts["first step"] == pytest.approx(0.1)
    assert found.parts["redone"] == pytest.approx(0.7), "six that were complete, and the one that was cut off"


def without(stamps: list[Stamp], **fields: Any) -> list[Stamp]:
    return [one for one in stamps if any(getattr(one, name) != value for name, value in fields.items())]


@pytest.mark.parametrize(
    ("stamps", "faults", "said"),
    [
        (job(18), [FAULT, FAULT], "2 faults were planned"),
        (job(18), [replace(FAULT, rank=0)], "of 'fault' in attempt 0"),
        (job(18), [replace(FAULT, behind=16)], "kill happened behind step 17"),
        (without(job(18), what="began", rank=1), [FAULT], "of 'began' in attempt 1"),
        (without(job(18), what="model", rank=0), [FAULT], "of 'model' in attempt 1"),
        (without(job(18), what="launcher has ended all"), [FAULT], "it was never said"),
        (job(19), [FAULT], "the job went on with step 19"),
        (job(19, jit=False), [FAULT], "the job went on with step 19"),
        (without(job(18), what="step", step=18, rank=1), [FAULT], "the job went on with step 18"),
    ],
)
def test_job_in_which_something_else_happened_is_no_measurement(
    stamps: list[Stamp], faults: list[Fault], said: str
) -> None:
    with pytest.raises(Unexpected, match=said):
        recovery_parts.recoveries(stamps, faults)


def test_fault_that_nobody_noticed_is_no_measurement() -> None:
    stamps = [one for one in job(18) if one.what not in ("noticed", "saved", "launcher notices")]
    with pytest.raises(Unexpected, match="nobody has noticed"):
        recovery_parts.recoveries(stamps, [FAULT])


def test_loss_of_a_redone_step_that_differs_in_a_bit_is_refused() -> None:
    stamps = job(first=11)
    assert len(recovery_parts.losses(stamps)) == 2 * 19
    stamps.append(Stamp("step", AT, AT, 0, 1, 12, "0000000d"))
    with pytest.raises(Unexpected, match="rank 0 had two losses at step 12"):
        recovery_parts.losses(stamps)


def test_what_ranks_write_is_what_is_read_of_all_of_them(tmp_path: Path) -> None:
    for rank in range(2):
        recorder = Recorder(tmp_path, rank, attempt=3)
        recorder.write("step", 1.25, 2.5, 7, "3f800000")
        with recorder.part("imports"):
            pass
    found = of_ranks(tmp_path)
    assert [one.rank for one in found] == [0, 0, 1, 1] and {one.attempt for one in found} == {3}
    assert found[0] == Stamp("step", 1.25, 2.5, 0, 3, 7, "3f800000") and found[1].since <= found[1].at
    with pytest.raises((ValueError, TypeError)):
        of_lines(['{"what": "step"}'])


def test_lines_of_the_launcher_and_of_a_save_are_stamped() -> None:
    saved = "understudy.jit: rank 1: step 17 saved in 0.250 s (a collective stands); all ranks arrived."
    assert fault_runs.stamp_of(saved, 10.0) == Stamp(
        "saved", 9.75, 10.0, 1, step=17, note="a collective stands"
    )
    lines = {
        "W1127 api.py:1028] Sending process 17 closing signal SIGTERM": "launcher notices",
        "E1127 api.py:1002] failed (exitcode: -9) local_rank: 0 (pid: 17) of binary: …": "launcher notices",
        "I1127 api.py:707] [default] Rendezvous'ing worker group": "launcher has ended all",
    }
    for line, what in lines.items():
        assert fault_runs.stamp_of(line, 10.0) == Stamp(what, 10.0, 10.0)
    assert fault_runs.stamp_of("step 3", 10.0) is None


def test_faults_are_drawn_from_the_seed_anywhere_between_two_checkpoints_that_lie_apart() -> None:
    places = set()
    for turn in range(200):
        faults = fault_plan.draw(5, turn, 2)
        assert faults == fault_plan.draw(5, turn, 2) and [one.kind for one in faults] == [*KINDS, *KINDS]
        assert [Fault.of(str(one)) for one in faults] == [*faults]
        gaps = [after.behind - before.behind for before, after in itertools.pairwise(faults)]
        assert min(gaps) > EVERY and faults[0].behind >= EVERY
        assert faults[-1].behind < fault_plan.steps(2)
        places |= {(one.rank, one.behind % EVERY) for one in faults}
    assert len(places) == 2 * EVERY


def steady(ratio: float, own: float, rounds: int = 4) -> dict[str, Any]:
    """Steps of 10 ms, which with `jit` take `ratio` times as long; of `own` of a step it says so itself."""
    blocks: list[dict[str, Any]] = []
    for number in range(rounds * len(PATTERN)):
        kind, count = PATTERN[number % len(PATTERN)], 6
        seconds = [0.01 * (1.0 if kind == "without" else ratio)] * count
        parts = {"boundary": [0.006 * own] * count, "hooks": [0.003 * own] * count}
        # 1e-3 * own of each 0.01 s
        blocks.append({"kind": kind, "seconds": seconds, "threads": 0.1 * own, "whole": 1.0, **parts})
    return {"model": "gpt", "parameters": 1000, "blocks": blocks}


@pytest.mark.parametrize(
    ("ratio", "own", "verdict"),
    [(1.0005, 0.0009, "yes"), (1.0005, 0.0011, "no"), (1.002, 0.0009, "not shown"), (0.9, 0.002, "no")],
)
def test_steady_cost_meets_its_aim_only_if_both_measurements_say_so(
    ratio: float, own: float, verdict: str
) -> None:
    cost = cost_of(steady(ratio, own))
    assert cost.ratio.median == pytest.approx(ratio) and cost.ratio.count == 8
    assert cost.own == pytest.approx(own) and cost.step == pytest.approx(0.01)
    assert cost.enough == pytest.approx(0.01 * own / AIM)
    assert cost.verdict == verdict


def test_blocks_that_are_no_whole_rounds_are_refused() -> None:
    result = steady(1.0, 0.0)
    cuts: list[list[Any]] = [[], result["blocks"][1:], result["blocks"][::-1][:4]]
    for blocks in cuts:
        with pytest.raises(ValueError, match="not whole rounds"):
            cost_of({**result, "blocks": blocks})


def test_spread_is_the_median_and_the_tenths_on_both_sides() -> None:
    assert Spread.of([float(one) for one in range(11)]) == Spread(5.0, 1.0, 9.0, 11)
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0, 1)
    with pytest.raises(ValueError, match="nothing"):
        Spread.of([])


def results() -> Results:
    jit = recovery_parts.recoveries(job(18), [FAULT])
    periodic = recovery_parts.recoveries(job(11, jit=False), [FAULT])
    stopped = {way: [replace(one, kind="stop") for one in found]
               for way, found in (("jit", jit), ("periodic", periodic))}  # fmt: skip
    return Results(
        machine=MACHINE, seed=7, command="make bench-jit", setting=asdict(jit_cost.SETTING), took=480.0,
        recoveries={"jit": jit * 3 + stopped["jit"], "periodic": periodic * 3 + stopped["periodic"]},
        repeated=["periodic, turn 2: it aborted"], losses=1234, step=0.1,
        checkpoint=Spread(0.02, 0.01, 0.03, 9),
        steady=[cost_of(steady(1.0005, 0.0009)), cost_of(steady(1.01, 0.02))],
    )  # fmt: skip


def test_report_is_made_of_the_json_alone_and_says_where_and_when(tmp_path: Path) -> None:
    found, file, page = results(), tmp_path / "jit.json", tmp_path / "jit.md"
    found.write(file)
    assert Results.read(file) == replace(found, recoveries=Results.read(file).recoveries)
    assert asdict(Results.read(file)) == json.loads(json.dumps(asdict(found)))
    assert jit_report.main([str(file), "--output", str(page)]) == 0
    said = page.read_text()
    assert said == jit_report.render(found)
    for one in ("commit abc1234", "2026-01-01", "load average 0.1", "seed 7", "1,234 losses", "it aborted"):
        assert one in said
    assert "add 28 s to *ended*" in said and "**yes**" in said and "**no**" in said
    rows = {line.split("|")[1].split(":")[0].strip(): line.split("|")[2:-1] for line in said.splitlines()
            if line.startswith("| ")}  # fmt: skip
    assert rows["saved"][1].strip() == "–" and rows["redone"][0].strip() == "–"
    assert rows["steps done once more"] == [" 0 (0 to 0) ", " 7 (7 to 7) "]
    assert rows["this, a rank killed"][1].strip() == "0.04"
    assert len([line for line in said.splitlines() if "V100" in line or "A100" in line]) == 8


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"recoveries": {}}'])
def test_file_that_is_no_result_is_refused_in_a_sentence(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "jit.json").write_text(text)
    assert jit_report.main([str(tmp_path / "jit.json"), "--output", str(tmp_path / "jit.md")]) == 2
    assert "is none that `make bench-jit` wrote" in capsys.readouterr().err
    assert not (tmp_path / "jit.md").exists()


class Jobs:
    """Stands for torchrun: `spoilt` jobs of a way fail before one does what it should."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **spoilt: int) -> None:
        self.spoilt, self.made = spoilt, list[str]()
        self.change: Callable[[list[Stamp]], list[Stamp]] = lambda stamps: stamps
        monkeypatch.setattr(fault_runs, "run", self.run)
        monkeypatch.setattr(fault_plan, "draw", lambda *_: (FAULT,))

    def run(self, way: str, *_: Any) -> list[Stamp]:
        self.made.append(way)
        if self.spoilt.get(way, 0) >= self.made.count(way):
            raise RunFailed(f"{way} did not end\nwithin 60 s")
        if way == "undisturbed":
            return [Stamp("step", AT, AT + 0.1, rank, 0, step, f"{step:08x}")
                    for step in range(1, FAULT.behind + 3) for rank in range(2)]  # fmt: skip
        return self.change(job(first=18)) if way == "jit" else job(first=11, jit=False)


def fault_jobs(tmp_path: Path) -> jit_cost.FaultRuns:
    return jit_cost.FaultRuns(jit_cost.QUICK, 1, jit_cost.SETTING, tmp_path)


def test_job_without_jit_that_was_spoilt_is_run_again_and_told_of_and_one_with_jit_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = Jobs(monkeypatch, periodic=2)
    runs = fault_jobs(tmp_path)
    runs.turn(0)
    assert jobs.made == ["undisturbed", "jit", "periodic", "periodic", "periodic"]
    assert runs.repeated == 2 * ["periodic, turn 1: within 60 s"]
    assert runs.losses == (17 + 2 + 17 + 9) * 2 and runs.step == pytest.approx(0.1)
    jobs = Jobs(monkeypatch, jit=1)
    runs = fault_jobs(tmp_path)
    with pytest.raises(RunFailed, match="jit did not end"):
        runs.turn(0)
    assert jobs.made == ["undisturbed", "jit"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda stamps: [*stamps[:-1], replace(stamps[-1], note="ffffffff")], "not those of the undisturbed"),
        (lambda stamps: stamps[:-1], "not those of the undisturbed"),
        (lambda _: job(first=11), "jit did 7 steps once more"),
    ],
)
def test_bit_that_differs_or_a_step_too_many_ends_the_bench(
    change: Callable[[list[Stamp]], list[Stamp]], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Jobs(monkeypatch).change = change
    runs = fault_jobs(tmp_path)
    with pytest.raises(RunFailed, match=said):
        runs.turn(0)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_whole_of_it_runs_and_its_report_is_whole(tmp_path: Path) -> None:
    output, report = tmp_path / "jit.json", tmp_path / "jit.md"
    assert jit_cost.main(["--quick", "--output", str(output), "--report", str(report)]) == 0
    found = Results.read(output)
    for way, recoveries in found.recoveries.items():
        assert [one.kind for one in recoveries] == [*KINDS]
        for one in recoveries:
            assert 0 <= one.unaccounted < 0.2 * one.total
            assert one.redone == (0 if way == "jit" else one.behind % EVERY)
    assert [cost.model for cost in found.steady] == ["mlp", "gpt", "convolutions"]
    assert all(cost.boundary > 0 and cost.hooks > 0 and cost.threads > 0 for cost in found.steady)
    assert report.read_text() == jit_report.render(found)
