"""What was there under a leader before us: which members have told of their ranks, and which never will."""

from __future__ import annotations

import asyncio

import structlog

from understudy.recovery.planning.takeover.workers import missing
from understudy.recovery.state.jobs import Job
from understudy.recovery.state.span import Span

log = structlog.get_logger()


class Attendance:
    """Who of one job has told of its ranks."""

    def __init__(self, job: Job, span: Span) -> None:
        self._job, self._span = job, span
        self._lost: dict[str, str] = {}
        """Hosts that were lost before they told of their ranks, and why."""
        self._sought: dict[int, asyncio.Event] = {}
        """Ranks that were on their way when their former leader was last heard of."""

    def told(self, host: str) -> None:
        """A host has told of all ranks that it has."""
        self._span.awaited.discard(host)

    def lost(self, host: str, why: str) -> None:
        """Nobody waits for it any more."""
        if host in self._span.awaited:
            self._span.awaited.discard(host)
            self._lost[host] = why

    def missing(self) -> tuple[list[int], dict[str, str]]:
        """Once nobody is awaited: ranks that nobody has told of, and why their hosts are lost."""
        if self._span.awaited or not self._lost:
            return [], {}
        lost, self._lost = self._lost, {}
        return self._untold(), lost

    def _untold(self) -> list[int]:
        worlds = [session.world for session in self._job.sessions.values()]
        return missing(worlds, self._job.sessions.keys(), self._job.departed.keys())

    def look_for_untold(self, patience_s: float) -> None:
        """Once nobody is awaited: whoever ran elsewhere, and of whom no host tells, has ended.

        That host may have closed the job since.  One that was on its way arrives within `patience_s`, or
        never.  Whoever was on a host that is lost is missing, and has not ended.
        """
        if self._span.awaited or self._lost:
            return
        remote, self._span.remote_ranks = self._span.remote_ranks, set()
        for rank in remote.intersection(self._untold()):
            if rank in self._span.astray:
                self._sought[rank] = asyncio.Event()
                asyncio.get_running_loop().call_later(patience_s, self._has_ended, rank)
            else:
                self._has_ended(rank)

    def sought(self) -> dict[asyncio.Event, str]:
        """Who may still be found, each with a sentence, until it is known."""
        return {
            known: f"rank {rank}, which was on its way to another host, is not found yet"
            for rank, known in self._sought.items() if rank not in self._job.sessions
        }  # fmt: skip

    def _has_ended(self, rank: int) -> None:
        if (known := self._sought.pop(rank, None)) is not None:
            known.set()
        if rank not in self._job.sessions and rank not in self._job.departed:
            log.warning("a rank has ended unheard", job=self._job.name, rank=rank)
            self._job.departed[rank] = False
