"""A recovery that cannot begin yet: nobody is given up for that, however long it takes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from made_up_ranks import a_job, end_server_of

from understudy.recovery.host.homes import Homes, NoHome
from understudy.recovery.host.leases import Leases
from understudy.recovery.job.coordinator import MOST_ROUNDS, Coordinator
from understudy.recovery.state.jobs import Session

TIMES = 3 * MOST_ROUNDS
SOON_S = 20.0


class AwaitedHomes(Homes):
    """Where nobody can be steered for now."""

    def __init__(self, leases: Leases) -> None:
        super().__init__(cast(Any, SimpleNamespace(fill=lambda: None)), leases)
        self.asked = 0
        self.problem = ""

    async def ready(self, sessions: list[Session], suspicious: bool) -> None:
        self.asked += 1
        if self.problem:
            raise NoHome(self.problem)
        await asyncio.Event().wait()


def test_faults_that_come_while_a_recovery_waits_use_up_no_round() -> None:
    async def scene() -> None:
        job = a_job(2)
        homes = AwaitedHomes(Leases(["cpu:0", "cpu:1"], cast(Any, None)))
        coordinator = Coordinator(job, homes, True, lambda _: None)
        end_server_of(job, 0)
        server: Any = job.sessions[1].server
        server.generation, server.failed_at = 0, -1
        for number in range(TIMES):
            coordinator.call_failed(job.sessions[1], 0, suspect=False, message="out of memory",
                                    record_index=10 + number)  # fmt: skip
            async with asyncio.timeout(SOON_S):
                while homes.asked <= number:
                    await asyncio.sleep(0)
        assert coordinator.recovering and not job.recoveries
        assert [session.state for session in job.sessions.values()] == ["recovering"] * 2
        await coordinator.cancel()

    asyncio.run(scene())
