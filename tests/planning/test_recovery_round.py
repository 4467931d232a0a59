"""One round of a recovery: how its steps end together, and what it leaves when one of them fails."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any, cast

import pytest
from made_up_ranks import Stub, a_job, end_server_of, step, stub_of

from understudy.protos import control_pb2 as pb
from understudy.recovery.agent_api.commands import NotDone
from understudy.recovery.base.background import all_of
from understudy.recovery.base.timing import Timing
from understudy.recovery.host.leases import Leases
from understudy.recovery.host.placement import HostPlacement
from understudy.recovery.job.former_servers import FormerServers
from understudy.recovery.job.recovery_round import Round
from understudy.recovery.job.server_steps import ServerSteps
from understudy.recovery.job.stages import RestoreFromReplicas, RoundFailed
from understudy.recovery.planning.facts import FaultFacts, FaultKind
from understudy.recovery.planning.planner import Plan, PlanName, Reload
from understudy.recovery.planning.replicas import Copy
from understudy.recovery.state.jobs import Job, Session


def a_round(job: Job) -> Round:
    pool: Any = None
    return Round(
        job, HostPlacement(pool, Leases([], pool)), True, lambda _: None, timing=Timing(notice_s=0.0)
    )


def test_the_steps_of_a_round_are_cancelled_in_their_order_and_have_ended_when_it_fails() -> None:
    ended: list[int] = []

    async def endless(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # what it still has to do is waited for
            ended.append(number)

    async def failing(number: int) -> None:
        raise RoundFailed(f"step {number}")

    works = [endless(0), failing(1), endless(2), failing(3), *(endless(n) for n in range(4, 40))]
    with pytest.raises(RoundFailed, match="step 1"):
        asyncio.run(all_of(works))
    assert ended == [0, 2, *range(4, 40)]


def test_a_round_that_is_cancelled_cancels_its_steps() -> None:
    ended: list[int] = []

    async def endless(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(number)

    async def main() -> None:
        task = asyncio.create_task(all_of([endless(n) for n in range(20)]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert ended == list(range(20))


def test_a_floor_is_lowered_to_a_snapshot_only_if_the_snapshot_was_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What lies between them is gone; it counted as kept when the request had not come through."""
    job = a_job(2)
    for number in range(1, 6):
        step(job, number, number)
    session = job.sessions[0]
    session.log.floor_commit = 4

    async def unreachable(self: Stub, request: Any, timeout: float) -> Any:
        raise NotDone("Socket closed")

    monkeypatch.setattr(Stub, "Restore", unreachable, raising=False)
    plan = Plan(PlanName.RESTORE_SNAPSHOT_REPLAY, "", (Reload(0, 2, fresh=False),))
    with pytest.raises(RoundFailed):
        asyncio.run(a_round(job)._go_back(plan, {0: session}))
    assert session.log.floor_commit == 4
    assert stub_of(job, 0).resumed == []


class Parks(Stub):
    """At once."""

    async def Park(self, request: Any, timeout: float) -> Any:
        return pb.ParkReply()


class Unreached(Stub):
    """Of another host, whose state is not read there."""

    def __init__(self) -> None:
        super().__init__()
        self.restores: list[Any] = []
        self.writes: list[Any] = []
        self.written = pb.WriteStateReply(name="a.1.2-tag.state", bytes=8)

    async def Restore(self, request: Any, timeout: float) -> Any:
        self.restores.append(pb.RestoreRequest.FromString(request.SerializeToString()))
        unread = [source.rank for source in request.sources if source.address.startswith("tls:")]
        return pb.RestoreReply(error="not reached" if unread else "", unread=unread, copied_bytes=16)

    async def WriteState(self, request: Any, timeout: float) -> Any:
        self.writes.append(request)
        return self.written


class AllAway(HostPlacement):
    """Nobody reaches rank 1."""

    def read_from(self, holder: Any, reader: Session) -> str:
        return "tls:b@10.0.0.2:1" if holder.pid == 1 else "unix:/s"


def restored_from_ranks_1_and_2() -> tuple[Job, Callable[[], int]]:
    """The job, and what restores its rank 0: it answers the bytes."""
    job = a_job(3)
    for session in job.sessions.values():
        cast(Any, session.server).stub = Unreached()
    job.generation = 4
    pool: Any = None
    placement = AllAway(pool, Leases([], pool))
    steps = ServerSteps(job, placement, FormerServers(placement), True, lambda _: None, None)
    steps.begin(job.sessions)
    copies = (Copy(10, 1, 20, 8, 5), Copy(11, 1, 20, 8, 5), Copy(12, 1, 21, 4, 6), Copy(13, 2, 30, 4, 7))
    wave = ((RestoreFromReplicas(0, 3, copies, None),),)
    return job, lambda: asyncio.run(steps.carry_out(wave))


def test_state_that_is_not_reached_goes_by_shared_storage_and_the_rest_as_ever() -> None:
    job, restore = restored_from_ranks_1_and_2()
    assert restore() == 16
    stubs: Any = [stub_of(job, rank) for rank in range(3)]
    addresses = [[source.address for source in request.sources] for request in stubs[0].restores]
    assert addresses == [["tls:b@10.0.0.2:1", "unix:/s"], ["shared:a.1.2-tag.state", "unix:/s"]]
    (asked,) = stubs[1].writes
    assert asked.generation == 4
    assert [(one.handle, one.offset, one.bytes) for one in asked.ranges] == [(20, 0, 8), (21, 0, 4)]
    assert stubs[2].writes == [] and not job.sessions[0].lacks_state


def test_state_that_is_not_had_by_shared_storage_either_is_told_with_both_reasons() -> None:
    job, restore = restored_from_ranks_1_and_2()
    stub: Any = stub_of(job, 1)
    stub.written = pb.WriteStateReply(error="its host has no --shared-directory")
    with pytest.raises(
        RoundFailed,
        match="rank 0 could not restore: not reached; nor by way of shared storage: its host has no --shared",
    ):
        restore()


def test_state_that_is_not_reached_twice_is_known_until_the_rank_has_its_own() -> None:
    job, restore = restored_from_ranks_1_and_2()
    stub: Any = stub_of(job, 1)
    round_, fault = a_round(job), FaultFacts(FaultKind.SERVER_DIED, (0,))
    stub.written = pb.WriteStateReply(error="no")
    known = []
    for _ in range(2):
        with pytest.raises(RoundFailed):
            restore()
        known.append([rank.unread for rank in round_.facts(fault).ranks])
    nobody: frozenset[int] = frozenset()
    assert known == [[nobody] * 3, [frozenset({1}), nobody, nobody]]
    stub.written = pb.WriteStateReply(name="a.1.2-tag.state")
    restore()
    assert round_.facts(fault).ranks[0].unread == nobody


def test_facts_of_a_fault_name_who_has_left() -> None:
    job = a_job(2)
    step(job, 1, 1)
    round_ = a_round(job)
    fault = FaultFacts(FaultKind.SERVER_DIED, (0,))
    assert [rank.rank for rank in round_.facts(fault).ranks] == [0, 1]
    job.last_facts[1] = round_.facts(fault).ranks[1]
    del job.sessions[1]
    assert [rank.rank for rank in round_.facts(fault).ranks] == [0]
    assert round_.facts(fault).departed == (1,)


def test_a_second_death_is_waited_for_before_its_server_is_replaced() -> None:
    """Its notice came when there was another server: the report told of one of the two only."""
    job = a_job(3)
    step(job, 1, 1, 1)
    end_server_of(job, 0)
    round_ = a_round(job)

    def check(fault: FaultFacts) -> None:
        asyncio.run(round_._check_that_deaths_were_noticed(list(job.sessions.values()), fault))

    died = FaultFacts(FaultKind.SERVER_DIED, (0,))
    check(died)
    end_server_of(job, 2)
    with pytest.raises(RoundFailed, match="rank 2 has died as well"):
        check(died)
    check(FaultFacts(FaultKind.SERVER_DIED, (0, 2)))
    job.sessions[2].server.retired = True  # by a round before this one
    check(died)


def test_a_death_amid_a_move_or_a_validation_of_its_rank_is_waited_for() -> None:
    """The report told of an orderly move; nobody counted the death."""
    job = a_job(2)
    step(job, 1, 1)
    end_server_of(job, 1)
    round_ = a_round(job)
    for fault in (
        FaultFacts(FaultKind.PLANNED_MOVE, (1,), sound=(1,)),
        FaultFacts(FaultKind.VALIDATION, (0, 1), sound=(0, 1)),
    ):
        with pytest.raises(RoundFailed, match="rank 1 has died as well"):
            asyncio.run(round_._check_that_deaths_were_noticed(list(job.sessions.values()), fault))


def test_of_failures_that_nobody_waits_for_any_more_asyncio_does_not_complain(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A round that is interrupted while its servers fail."""

    async def fails() -> None:
        raise RuntimeError

    async def interrupted() -> None:
        works = asyncio.gather(all_of(fails() for _ in range(3)))
        for _ in range(2):  # they begin, and have failed
            await asyncio.sleep(0)
        works.cancel()
        with pytest.raises(asyncio.CancelledError):
            await works

    asyncio.run(interrupted())
    gc.collect()
    assert [record.getMessage() for record in caplog.records] == []


def test_a_rank_that_ended_while_the_plan_was_written_down_is_planned_without() -> None:
    """Its worker can end in the very turn in which the decision has become durable."""
    job = a_job(2)
    step(job, 1, 1)
    end_server_of(job, 0)
    cast(Any, job.sessions[1].server).stub = Parks()

    async def decided() -> None:
        del job.sessions[1]

    pool: Any = None
    round_ = Round(job, HostPlacement(pool, Leases([], pool)), True, lambda _: None, decided=decided)
    with pytest.raises(RoundFailed, match="rank 1 has ended since the plan was made"):
        asyncio.run(round_.run(FaultFacts(FaultKind.SERVER_DIED, (0,)), []))
