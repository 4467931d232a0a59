"""When floors move: the keeper over ranks that are made up."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from made_up_ranks import WEIGHT, a_job, log_of, step, stub_of
from structlog.testing import capture_logs

from understudy import replay
from understudy.recovery.base.timing import Timing
from understudy.recovery.state.jobs import Job
from understudy.recovery.upkeep.floors import FloorKeeper
from understudy.recovery.upkeep.validation import ValidationSchedule


class Recovery:
    """What the keeper tells a coordinator."""

    def __init__(self, repairs: bool = True) -> None:
        self.repairs = repairs
        self.recovering = self.restoring = False
        self.found: list[str] = []

    def corruption_found(self, session: Any, message: str, trusted: Any) -> bool:
        self.found.append(message)
        return self.repairs


def a_keeper(job: Job, recovery: Recovery) -> FloorKeeper:
    return FloorKeeper(job, cast(Any, recovery), True, ValidationSchedule(job, 0), Timing(look_idle_s=0.0))


def look(keeper: FloorKeeper) -> None:
    asyncio.run(keeper.look())


def learnt(job: Job, recovery: Recovery) -> FloorKeeper:
    """The weights are known to be replicas, and the floors stand at commit 8."""
    keeper = a_keeper(job, recovery)
    for number in range(1, 9):
        step(job, number, number)
        look(keeper)
    return keeper


def floors(job: Job) -> set[int]:
    return {session.log.floor_commit for session in job.sessions.values()}


def test_floors_wait_at_a_commit_whose_digests_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """They moved, although nobody had looked whether the replicas agree there."""

    def overwritten(number: int, handles: list[int]) -> list[int | None]:
        raise replay.LogError(f"the manifest of commit {number} is damaged")

    job, recovery = a_job(2), Recovery()
    keeper = learnt(job, recovery)
    step(job, 9, 900)
    with monkeypatch.context() as patch:
        patch.setattr(log_of(job, 1), "digests", overwritten)
        look(keeper)
    assert floors(job) == {8}
    step(job, 10, 10)
    look(keeper)
    assert floors(job) == {10}


def test_floors_move_where_no_manifest_had_room() -> None:
    job, recovery = a_job(2), Recovery()
    keeper = learnt(job, recovery)
    for number in range(9, 50):
        step(job, number, number + 100, manifest=False)
        look(keeper)
    assert floors(job) != {8}
    assert not recovery.found


def test_a_difference_that_cannot_be_repaired_is_reported_once_and_floors_go_on() -> None:
    job, recovery = a_job(2), Recovery(repairs=False)
    keeper = learnt(job, recovery)
    step(job, 9, 900)
    look(keeper)
    assert len(recovery.found) == 1
    assert floors(job) == {8}
    for number in range(10, 13):
        step(job, number, number + 100)
        look(keeper)
    assert len(recovery.found) == 1
    assert floors(job) == {12}


def test_a_difference_seen_while_a_recovery_is_under_way_is_reported_after_it() -> None:
    """It counted as the program's own when it was seen again."""
    job, recovery = a_job(2), Recovery()
    keeper = learnt(job, recovery)
    recovery.recovering = True
    step(job, 9, 900)
    look(keeper)
    assert not recovery.found
    recovery.recovering = False
    step(job, 10, 1000)
    look(keeper)
    assert len(recovery.found) == 1
    assert f"buffer {WEIGHT} of rank 1" in recovery.found[0]
    assert floors(job) == {8}


def test_a_difference_that_replay_makes_again_is_the_programs_own_also_if_it_is_seen_some_steps_later() -> (
    None
):
    """It was another corruption, and another recovery, as often as the next look came a step too late."""
    job, recovery = a_job(2), Recovery()
    keeper = learnt(job, recovery)
    for number in (9, 11, 12, 13):  # the 9th is where it is repaired, and that is not looked at again
        step(job, number, 100 * number)
        look(keeper)
    assert len(recovery.found) == 1
    step(job, 14, 1400)
    look(keeper)
    assert floors(job) == {13}, "its commits count from one"


def test_a_difference_behind_one_that_was_repaired_is_another_corruption() -> None:
    job, recovery = a_job(2), Recovery()
    keeper = learnt(job, recovery)
    for number, other in ((9, 900), (10, 10), (11, 1100)):
        step(job, number, other)
        look(keeper)
    assert len(recovery.found) == 2


def test_a_recovery_does_not_make_ranks_shadow_replicas_again() -> None:
    """One look cannot tell replicas; it took back what was known, until the next check 16 commits later."""
    job, recovery = a_job(2), Recovery()
    keeper = learnt(job, recovery)
    announced = [stub_of(job, rank).announced for rank in range(2)]
    assert announced[0] and announced[0][-1] == announced[1][-1] == [WEIGHT]
    for told in announced:
        told.clear()
    job.generation += 1
    for number in range(9, 12):
        step(job, number, number)
        look(keeper)
    assert announced[0] == announced[1]
    assert announced[0] and set(map(tuple, announced[0])) == {(WEIGHT,)}


def test_a_time_without_a_common_cut_does_not_end_the_keeper() -> None:
    """It looked for its replicas there, and died: floors never moved again, until the log was full."""
    job, recovery = a_job(2), Recovery()
    keeper = learnt(job, recovery)
    log_of(job, 1).ring.clear()
    step(job, 9, 9)
    for known in log_of(job, 0).ring.values():
        known.communicators[:] = [(1, 0, known.number + 100)]
    look(keeper)
    assert floors(job) == {8}
    step(job, 10, 10)
    look(keeper)
    assert floors(job) == {10}


def test_trouble_in_a_look_is_logged_once_and_the_next_look_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    job, recovery = a_job(2), Recovery()
    keeper = a_keeper(job, recovery)
    looks: list[int] = []

    async def damaged() -> bool:
        looks.append(1)
        if len(looks) > 3:
            raise asyncio.CancelledError
        raise replay.LogError(f"damaged at {len(looks)}")  # each time another message

    monkeypatch.setattr(keeper, "look", damaged)
    with capture_logs() as said, pytest.raises(asyncio.CancelledError):
        asyncio.run(keeper.run())
    assert len(looks) == 4
    assert [line["event"] for line in said] == ["a look failed"]
