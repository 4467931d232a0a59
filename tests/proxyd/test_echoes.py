"""One failed collective is told of by every rank that was in it, and costs the leader no more for that."""

from __future__ import annotations

import asyncio

import made_up_ranks as ranks
import pytest
from simulation.log import RING, Commit

from understudy.recovery.host import evidence
from understudy.recovery.planning.facts import FaultKind
from understudy.recovery.state.jobs import Job
from understudy.recovery.state.recovery_progress import Stage

MANY = 300


class Reading:
    """How often the facts of a rank are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = 0
        read = evidence.rank_facts

        def counted(*given: object) -> object:
            self.times += 1
            return read(*given)  # type: ignore[arg-type]

        monkeypatch.setattr(evidence, "rank_facts", counted)


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Reading:
    return Reading(monkeypatch)


def job_of(count: int) -> Job:
    job = ranks.a_job(count)
    ranks.step(job, *range(1, count + 1))
    return job


def test_facts_of_all_ranks_are_read_once_for_all_that_tell_of_a_collective(reading: Reading) -> None:
    async def main() -> None:
        job = job_of(MANY)
        coordinator = ranks.a_coordinator(job)
        for session in job.sessions.values():
            coordinator.collective_failed(session, session.generation, "connection closed by peer", 7)
        assert coordinator.recovering
        assert [fault.rank for fault in coordinator._noticed.faults] == [0]
        assert MANY <= reading.times <= 2 * MANY
        await coordinator.cancel()

    asyncio.run(main())


def test_a_collective_that_no_known_fault_concerns_is_a_fault_of_its_own(reading: Reading) -> None:
    async def main() -> None:
        job = ranks.a_job(4)
        for session in job.sessions.values():
            log, pair = ranks.log_of(job, session.rank), session.rank // 2
            log.ring[1 % RING] = Commit(1, 1, True, True, [(pair + 1, 0, 1)], [2], 1, [])
            log.commit_count, log.step = 1, 2
        coordinator = ranks.a_coordinator(job)
        for rank in (0, 1, 2, 3, 1, 3, 0):
            session = job.sessions[rank]
            coordinator.collective_failed(session, session.generation, "connection closed by peer", 7)
        assert [fault.rank for fault in coordinator._noticed.faults] == [0, 2]
        await coordinator.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("kind", [FaultKind.SILENT_CORRUPTION, FaultKind.PLANNED_MOVE])
def test_what_fails_while_ranks_are_to_go_back_though_nothing_broke_is_no_echo(kind: FaultKind) -> None:
    """It may turn out that they cannot, and stay where they are; then nobody would see to what failed."""

    async def main() -> None:
        job = job_of(2)
        coordinator = ranks.a_coordinator(job)
        coordinator._notice(job.sessions[0], kind, 0, 0, "an order, or another digest", counts=False)
        assert job.progress.stage is Stage.PREPARING
        for session in job.sessions.values():
            coordinator.collective_failed(session, session.generation, "a peer closed its connection", 7)
        assert [fault.kind for fault in coordinator._noticed.faults] == [kind, FaultKind.COLLECTIVE_FAILED]
        await coordinator.cancel()

    asyncio.run(main())
