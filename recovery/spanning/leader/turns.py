"""Members open ranks while no recovery is under way, and no other rank opens."""

from __future__ import annotations

import asyncio

from understudy.recovery.state.jobs import Job

LONGEST_S = 100.0
"""Whoever takes longer has lost its turn."""


class Turns:
    """Lets the members of one job open ranks in turn."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._begun: dict[tuple[str, int], asyncio.TimerHandle] = {}

    async def begin(self, host: str, rank: int) -> None:
        """No recovery begins until `end`; waits for one that is under way."""
        await self._job.opening.acquire()
        loop = asyncio.get_running_loop()
        self._begun[host, rank] = loop.call_later(LONGEST_S, self.end, host, rank)

    def end(self, host: str, rank: int) -> bool:
        """Whether that host had begun, and not for too long."""
        timer = self._begun.pop((host, rank), None)
        if timer is None:
            return False
        timer.cancel()
        self._job.opening.release()
        return True

    def close(self) -> None:
        """The job is over."""
        for timer in self._begun.values():
            timer.cancel()
