"""One round of a recovery: how its steps end together, and what it leaves when one of them fails."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from made_up_ranks import Stub, a_job, end_server_of, step, stub_of

from recovery import recovery_round
from recovery.facts import FaultFacts, FaultKind
from recovery.homes import Homes
from recovery.jobs import Job
from recovery.leases import Leases
from recovery.planner import Plan, PlanName, Reload
from recovery.recovery_round import Round, RoundFailed, _all


def a_round(job: Job) -> Round:
    pool: Any = None
    return Round(job, Homes(pool, Leases([], pool)), True, lambda _: None)


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
        asyncio.run(_all(works))
    assert ended == [0, 2, *range(4, 40)]


def test_a_round_that_is_cancelled_cancels_its_steps() -> None:
    ended: list[int] = []

    async def endless(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(number)

    async def main() -> None:
        task = asyncio.create_task(_all([endless(n) for n in range(20)]))
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
        raise grpc.RpcError("Socket closed")

    monkeypatch.setattr(Stub, "Restore", unreachable, raising=False)
    plan = Plan(PlanName.RESTORE_SNAPSHOT_REPLAY, "", (Reload(0, 2, fresh=False),))
    with pytest.raises(RoundFailed):
        asyncio.run(a_round(job)._go_back(plan, [session]))
    assert session.log.floor_commit == 4
    assert stub_of(job, 0).resumed == []


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


def test_a_second_death_is_waited_for_before_its_server_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its notice came when there was another server: the report told of one of the two only."""
    monkeypatch.setattr(recovery_round, "NOTICE_S", 0.0)
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


def test_a_death_amid_a_move_or_a_validation_of_its_rank_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The report told of an orderly move; nobody counted the death."""
    monkeypatch.setattr(recovery_round, "NOTICE_S", 0.0)
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
