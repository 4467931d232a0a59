"""Which device a session gets: not one that failed, is drained, or is kept for a rank on its way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from understudy.recovery.base.errors import Refused
from understudy.recovery.drills.spec import Drill
from understudy.recovery.host.leases import Leases
from understudy.recovery.host.servers import ServerPool
from understudy.recovery.state.counts import ScheduledDrill
from understudy.recovery.state.jobs import Job, Session

NAMES = ["cpu:0", "cpu:1", "cpu:2"]


class Pool:
    """Knows for which devices a server is to be kept ready."""

    def __init__(self) -> None:
        self.free = set(NAMES)

    def lease(self, device: str) -> None:
        self.free.discard(device)

    def unlease(self, device: str, fill: bool = True) -> None:
        self.free.add(device)


def session(leases: Leases, index: int) -> Session:
    """One that holds a device."""
    made: Any = SimpleNamespace(
        rank=index, device_index=index, device=NAMES[index], asked_index=index, destination=None,
        job=Job("a job", None, []), log=SimpleNamespace(drills=list),
    )  # fmt: skip
    leases.hold(cast(Session, made))
    return cast(Session, made)


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def leases(pool: Pool) -> Leases:
    return Leases(NAMES, cast(ServerPool, pool))


def wanted(pool: Pool) -> list[int]:
    return [int(name in pool.free) for name in NAMES]


def test_nobody_gets_a_drained_device_until_that_is_undone(leases: Leases, pool: Pool) -> None:
    leases.drain(1)
    assert leases.free() == [0, 2] and leases.place(1) == 0
    assert wanted(pool) == [1, 0, 1], "no server is kept ready for it"
    leases.undrain(1)
    assert leases.place(1) == 1 and wanted(pool) == [1, 1, 1]


def test_a_drained_device_stays_drained_when_its_session_ends(leases: Leases, pool: Pool) -> None:
    held = session(leases, 1)
    leases.drain(1)
    leases.release(held)
    assert leases.free() == [0, 2] and wanted(pool) == [1, 0, 1]
    leases.undrain(1)
    assert wanted(pool) == [1, 1, 1]


def test_a_device_that_is_kept_is_for_one_session_alone(leases: Leases, pool: Pool) -> None:
    moving, other = session(leases, 0), session(leases, 1)
    leases.keep(2, moving)
    moving.destination = 2
    assert leases.free() == []
    leases.fence(other, "it is gone")
    assert leases.is_homeless(other) and not leases.move(other)
    with pytest.raises(Refused, match="rank 0 had to move to it"):
        leases.place(2)
    leases.arrive(moving)
    assert (moving.device, moving.destination) == ("cpu:2", None)
    leases.let_go(2)
    assert leases.free() == [0] and wanted(pool) == [1, 0, 0]
    assert leases.move(other) and other.device == "cpu:0"


def test_a_rank_whose_device_fails_on_its_way_goes_where_it_was_to_go(leases: Leases) -> None:
    moving = session(leases, 0)
    leases.keep(2, moving)
    moving.destination = 2
    leases.fence(moving, "it is gone")
    assert not leases.is_homeless(moving)
    leases.arrive(moving)
    assert leases.holder(2) is moving and leases.free() == [1]


def test_a_device_that_does_not_exist_is_named_beside_those_that_do(leases: Leases) -> None:
    with pytest.raises(Refused, match="there is no device cpu:9; there are: cpu:0, cpu:1, cpu:2"):
        leases.index("cpu:9")


def test_what_failed_in_a_drill_can_be_had_again_once_the_job_has_ended(leases: Leases, pool: Pool) -> None:
    struck, broken = session(leases, 0), session(leases, 1)
    drills = [ScheduledDrill(Drill("device-gone", rank=rank, step=0, call=0)) for rank in (0, 1)]
    drills[0].fired = True  # the other one is still to come: what failed before it has failed
    struck.job.drills, broken.job.drills = [drills[0]], [drills[1]]
    for one in (struck, broken):
        leases.fence(one, "it is gone")
        leases.release(one)
    assert leases.free() == [2]
    leases.lift_rehearsed("another job")
    assert leases.free() == [2]
    leases.lift_rehearsed("a job")
    assert leases.free() == [0, 2] and wanted(pool) == [1, 0, 1], "what truly failed stays fenced"
    leases.lift(1)
    assert leases.free() == [0, 1, 2] and wanted(pool) == [1, 1, 1]


def test_who_arrives_when_nothing_else_is_free_gets_a_drained_device(leases: Leases) -> None:
    """It was on its way when that device was drained, and could not go back."""
    leases.drain(0)
    others = leases.free()
    assert others and 0 not in others and leases.for_arrivals() == others
    for index in others:
        leases.fenced[index] = "it fell off the bus"
    assert leases.free() == [] and leases.for_arrivals() == [0]
    leases.fenced[0] = "it fell off the bus"
    assert leases.for_arrivals() == []
