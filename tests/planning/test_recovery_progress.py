"""Stages of a recovery: what they are called, how they are timed, and who is told."""

from __future__ import annotations

from pathlib import Path

import proxied
import pytest
from training_run import ROOT

from understudy.recovery.state.recovery_progress import RecoveryProgress, Stage


class Clock:
    """Nanoseconds."""

    def __init__(self) -> None:
        self.now = 7_000_000_000

    def __call__(self) -> int:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += int(seconds * 1e9)


def test_each_stage_is_timed_over_all_rounds_of_a_recovery() -> None:
    clock = Clock()
    progress = RecoveryProgress(clock)
    for stage, seconds in (
        (Stage.PREPARING, 0.5), (Stage.PARKING, 20.0), (Stage.PREPARING, 0.25), (Stage.PARKING, 0.125),
    ):  # fmt: skip
        progress.enter(stage)
        clock.passes(seconds)
    assert progress.seconds() == {"preparing": 0.75, "parking": 20.125}
    assert (progress.stage, progress.in_stage_s, progress.under_way_s) == (Stage.PARKING, 0.125, 20.875)


def test_nothing_is_under_way_before_and_behind_a_recovery_and_the_next_one_begins_anew() -> None:
    clock = Clock()
    progress = RecoveryProgress(clock)
    assert (progress.stage, progress.under_way_s, progress.in_stage_s, progress.seconds()) == (None, 0, 0, {})
    progress.enter(Stage.REPLAYING)
    clock.passes(3.0)
    progress.end()
    assert (progress.stage, progress.under_way_s, progress.in_stage_s) == (None, 0, 0)
    progress.enter(Stage.GATHERING)
    clock.passes(1.0)
    assert progress.seconds() == {"gathering": 1.0}


@pytest.mark.parametrize("stage", Stage)
def test_ranks_are_steered_unless_they_run_to_a_validation_or_replay(stage: Stage) -> None:
    progress = RecoveryProgress()
    assert not progress.steers
    progress.enter(stage)
    assert progress.steers == (stage not in (Stage.GATHERING, Stage.REPLAYING))


def test_the_documented_stages_are_those_that_there_are() -> None:
    section = (ROOT / "docs/faults.md").read_text().split("\n## Stages of a recovery\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [stage.value for stage in Stage]


@pytest.mark.drawn(2)
def test_the_report_has_the_stages_of_each_recovery(folder: Path) -> None:
    tiny = proxied.WORKLOADS / "tiny.py"
    drill = "kill-server rank=1 step=3 call=5"
    ended = proxied.run(
        proxied.torchrun(2, tiny), folder=folder,
        # Else a rank that is ahead may wait for its first validation when the other one's server dies.
        options=("--devices", "cpu:2", "--drill", drill, "--validate-every", "0"),
    )  # fmt: skip
    assert ended.status == 0, ended.output[-3000:]
    (recovery,) = ended.report["recoveries"]
    print(recovery["stages"])
    assert set(recovery["stages"]) == {stage.value for stage in Stage} - {"gathering"}
    assert 0 < sum(recovery["stages"].values()) <= recovery["total_s"] + 0.001
