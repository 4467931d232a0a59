"""Ranks that stand at the end of a minibatch which is to be executed twice, and wait for the others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from understudy.protos import control_pb2 as pb
from understudy.recovery.agent_api.commands import NotDone
from understudy.recovery.state.jobs import Job, Session

log = structlog.get_logger()

ALL_WITHIN = 5.0
"""Seconds in which ranks that are to be validated together must all have arrived."""
LOOK_S = 0.1
"""How often it is looked whether a server has left the minibatch out: shared memory has no event."""


class ValidationBarrier:
    """Holds the ranks of one job until all have come."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._generations: dict[int, int] = {}
        """Rank -> generation in which it came to stand; a later one has taken it away from there."""
        self._changed = asyncio.Event()

    def add(self, session: Session, generation: int) -> None:
        """Its server stands."""
        self._generations[session.rank] = generation
        self._changed.set()

    def look_again(self) -> None:
        """Something else happened that those who wait for the others should know."""
        self._changed.set()

    def sessions(self) -> list[Session]:
        """Who stands, and was not taken back since."""
        return [
            session
            for session in self._job.active_sessions()
            if self._generations.get(session.rank) == session.generation
        ]

    async def everybody(self, disturbed: Callable[[], bool]) -> bool:
        """Whether all ranks came, rather than one that will not come, too late, or a disturbance."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + ALL_WITHIN
        while not disturbed() and loop.time() < deadline:
            self._changed.clear()
            sessions = self._job.active_sessions()
            if self._job.departed or not sessions or len(sessions) < sessions[0].world:
                return False
            if not all(session.log.validate_step for session in sessions):
                return False  # the order was withdrawn
            if len(self.sessions()) == len(sessions):
                return True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), LOOK_S)
        return False

    async def release(self) -> list[tuple[Session, str]]:
        """Let them go on, as the validation does not come about; answers who did not, and why."""
        paused, self._generations = self.sessions(), {}
        for session in self._job.active_sessions():
            session.log.validate_step = 0
        failed: list[tuple[Session, str]] = []
        for session in paused:
            log.warning("not validated", job=self._job.name, rank=session.rank, step=session.log.step)
            request = pb.ResumeRequest(generation=self._job.generation)
            try:
                problem = (await session.server.execute(request)).error
            except NotDone as failure:
                problem = str(failure)
            if problem:
                failed.append((session, problem))
        return failed

    def forget(self) -> None:
        """Nobody stands any more."""
        self._generations = {}
