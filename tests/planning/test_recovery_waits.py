"""A recovery that cannot begin yet: nobody is given up for that, however long it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from made_up_ranks import a_job, end_server_of, step, stub_of

from understudy.recovery.host.leases import Leases
from understudy.recovery.host.placement import HostPlacement
from understudy.recovery.job.coordinator import MOST_ROUNDS, Coordinator
from understudy.recovery.state.jobs import Job, Session
from understudy.recovery.upkeep.validation import FIRST

TIMES = 3 * MOST_ROUNDS
SOON_S = 20.0


class AwaitedPlacement(HostPlacement):
    """Where nobody can be steered for now."""

    def __init__(self, job: Job) -> None:
        pool = cast(Any, SimpleNamespace(fill=lambda: None))
        super().__init__(pool, Leases([session.device for session in job.sessions.values()], pool))
        self.asked = 0

    async def ready(self, sessions: list[Session], suspicious: bool) -> None:
        self.asked += 1
        await asyncio.Event().wait()

    def awaited(self, sessions: Sequence[Session]) -> str:
        return "etcd is away"


def test_faults_that_come_while_a_recovery_waits_use_up_no_round() -> None:
    async def scene() -> None:
        job = a_job(2)
        placement = AwaitedPlacement(job)
        coordinator = Coordinator(job, placement, True, lambda _: None)
        end_server_of(job, 0)
        server: Any = job.sessions[1].server
        server.generation, server.failed_at = 0, -1
        for number in range(TIMES):
            coordinator.call_failed(job.sessions[1], 0, suspect=False, message="out of memory",
                                    record_index=10 + number)  # fmt: skip
            async with asyncio.timeout(SOON_S):
                while placement.asked <= number:
                    await asyncio.sleep(0)
        assert coordinator.recovering and not job.recoveries
        assert [session.state for session in job.sessions.values()] == ["recovering"] * 2
        await coordinator.cancel()

    asyncio.run(scene())


def test_an_order_to_move_is_declined_and_nobody_is_held_while_a_recovery_would_have_to_wait() -> None:
    async def scene() -> None:
        job = a_job(2)
        coordinator = Coordinator(job, placement := AwaitedPlacement(job), True, lambda _: None)
        coordinator.move(job.sessions[1])
        async with asyncio.timeout(SOON_S):
            await coordinator.finish()
        assert job.sessions[1].declined == "nobody can be steered for the moment: etcd is away"
        assert not placement.asked and not job.recoveries
        assert [session.state for session in job.sessions.values()] == ["running"] * 2

    asyncio.run(scene())


def test_ranks_that_stand_for_a_validation_are_let_go_on_while_it_would_have_to_wait() -> None:
    """Training goes on while etcd is away, so it must not stand still for a validation either."""

    async def scene() -> None:
        job = a_job(2)
        step(job, 1, 1)
        for session in job.sessions.values():
            session.log.validate_step = FIRST
        coordinator = Coordinator(job, placement := AwaitedPlacement(job), True, lambda _: None)
        for session in job.sessions.values():
            coordinator.validation_reached(session, session.generation)
        async with asyncio.timeout(SOON_S):
            await coordinator.finish()
        assert [stub_of(job, rank).resumed for rank in (0, 1)] == [[0], [0]]
        assert not placement.asked and job.generation == 0

    asyncio.run(scene())
