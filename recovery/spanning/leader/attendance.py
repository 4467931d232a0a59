"""Members that had ranks under a leader before us: who has told of them, and who never will."""

from __future__ import annotations

from understudy.recovery.planning.takeover.workers import missing
from understudy.recovery.state.jobs import Job
from understudy.recovery.state.span import Span


class Attendance:
    """Who of one job has told of its ranks."""

    def __init__(self, job: Job, span: Span) -> None:
        self._job, self._span = job, span
        self._lost: dict[str, str] = {}
        """Hosts that were lost before they told of their ranks, and why."""

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
        worlds = [session.world for session in self._job.sessions.values()]
        return missing(worlds, self._job.sessions.keys(), self._job.departed.keys()), lost
