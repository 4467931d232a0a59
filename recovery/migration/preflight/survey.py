"""proxyd looks, in the background and now and then, at what stands in the way of moving each worker."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping

import structlog

from understudy.recovery.base.background import Complaints
from understudy.recovery.machine.criu import Criu, find
from understudy.recovery.migration.preflight.obstacles import obstacles, obstacles_between_hosts, sentence
from understudy.recovery.migration.preflight.process_tree import read_tree
from understudy.recovery.state.jobs import Job, Session

log = structlog.get_logger()

FIRST_AFTER_S, AGAIN_AFTER_S = 3.0, 60.0
"""From the beginning of a session: data loaders and connections are made then; a look takes 20 ms."""
PAUSE_S = 1.0
LOOKS, LOOK_AGAIN_S = 5, 0.05
"""Before a move."""


def survey(rank: int, worker_pid: int, *, between_hosts: bool = False) -> list[str]:
    """A sentence for each obstacle; none if the worker has ended."""
    try:
        tree = read_tree(worker_pid)
    except ProcessLookupError:
        return []
    except OSError as problem:
        return [f"rank {rank} (pid {worker_pid}): cannot be looked at: {problem.strerror or problem}"]
    found = obstacles(tree) + (obstacles_between_hosts(tree) if between_hosts else [])
    return [sentence(rank, worker_pid, tree, one) for one in found]


async def lasting_obstacles(rank: int, worker_pid: int, *, between_hosts: bool = False) -> list[str]:
    """What is there at each of several looks: data loaders open a socket for each batch, and close it."""
    found = await asyncio.to_thread(survey, rank, worker_pid, between_hosts=between_hosts)
    for _ in range(LOOKS - 1):
        if not found:
            break
        await asyncio.sleep(LOOK_AGAIN_S)
        again = await asyncio.to_thread(survey, rank, worker_pid, between_hosts=between_hosts)
        found = [text for text in found if text in again]
    return found


def trouble_of_machine(criu: Criu | None) -> str:
    """Why nothing can be moved from here, whatever it holds."""
    if criu is None or not criu.recent:
        return "this machine has no CRIU that is recent enough: recoveryctl doctor"
    return "" if os.geteuid() == 0 else "CRIU needs root here: recoveryctl doctor"


class Survey:
    """Looks at the workers of all jobs of a proxyd."""

    def __init__(
        self, jobs: Mapping[str, Job], first_after_s: float = FIRST_AFTER_S, pause_s: float = PAUSE_S
    ) -> None:
        self._jobs = jobs
        self._first_after_s, self._pause_s = first_after_s, pause_s
        self._due: dict[Session, float] = {}
        self._machine: str | None = None
        self._complaints = Complaints("survey")

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._look_at_all()  # of which no name holds a session, and so its log, while we sleep
            await asyncio.sleep(self._pause_s)

    async def _look_at_all(self) -> None:
        sessions = {
            session
            for job in self._jobs.values()
            for session in job.sessions.values()
            if not session.host  # its own proxyd looks, and tells
        }
        self._due = {session: due for session, due in self._due.items() if session in sessions}
        for session in sessions:
            due = self._due.setdefault(session, time.monotonic() + self._first_after_s)
            if due <= time.monotonic():
                with self._complaints.survived(session.job.name):
                    await self._look(session)
                self._due[session] = time.monotonic() + AGAIN_AFTER_S

    async def _look(self, session: Session) -> None:
        if self._machine is None:
            self._machine = await asyncio.to_thread(lambda: trouble_of_machine(find()))
        found = await asyncio.to_thread(survey, session.rank, session.worker.pid)
        if not session.worker.running:
            return
        told, session.obstacles = session.obstacles, (*found, *filter(None, [self._machine]))
        if session.obstacles and told is None:
            told_by = log.info if session.relay else log.debug  # nobody else has asked
            told_by("not migratable", job=session.job.name, rank=session.rank, obstacles=session.obstacles)
