"""proxyd's part of the stored log: one copier per run of a job, and how long logs wait for it.

A log is kept for its copier as long as that keeps up.  Training never waits for storage: a copier that lags
is left behind, the stored log has a gap there, and is of use again from the next complete set on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence

import structlog

from understudy.recovery.base.own_modules import module_command
from understudy.recovery.snapshots.log.log_messages import (
    Copied,
    Drop,
    Follow,
    Rank,
    Trouble,
    decode,
)
from understudy.recovery.snapshots.settings import PersistenceSettings
from understudy.recovery.state.jobs import Job, Session

log = structlog.get_logger()

LOOK_S = 0.05
RETRY_S = 2.0
"""After a copier that ended."""
KILLED_S = 2.0
PATIENCE = 0.25
"""Share of a log's cap that may wait for storage."""
LATE_S = 5.0
"""A log that has waited for storage for so long is told of."""


class LogKeeping:
    """Keeps the stored log of one job."""

    def __init__(
        self, job: Job, settings: PersistenceSettings, run_of: Callable[[Sequence[Session]], str]
    ) -> None:
        self._job, self._settings, self._run_of = job, settings, run_of
        self._sessions: list[Session] = []
        self._pipe: asyncio.StreamWriter | None = None
        self._dropped: dict[int, int] = {}
        self._caught_up_s: dict[int, float] = {}

    async def run(self) -> None:
        """A copier whenever all ranks are there; until cancelled."""
        while True:
            sessions = self._job.active_sessions()
            if not sessions or len(sessions) < sessions[0].world:
                await asyncio.sleep(LOOK_S)
                continue
            self._sessions, self._dropped = sessions, {}
            self._caught_up_s = dict.fromkeys((s.rank for s in sessions), time.monotonic())
            for session in sessions:
                session.log.describe_steps = True
                known = max(session.logged_offset, session.log.log_uncopied_from)  # to a proxyd that died
                session.log.log_uncopied_from = max(known, 1)
            try:
                ended = await self._follow_copier()
            except (OSError, ValueError) as problem:
                ended = str(problem)
            if self._current():
                self._tell(sessions, f"its copier ended: {ended}")
                await asyncio.sleep(RETRY_S)

    def take(self, message: Copied | Trouble) -> None:
        """From the copier."""
        session = next((one for one in self._sessions if one.rank == message.rank), None)
        if session is None or not session.active:
            return
        if isinstance(message, Trouble):
            self._job.stored_log.failures += 1
            self._tell([session], message.error)
            return
        session.logged_offset = max(session.logged_offset, message.offset)
        session.logged_step = max(session.logged_step, message.step)
        session.log_note = ""
        self._job.stored_log.bytes += message.bytes
        self._job.stored_log.gaps += message.gaps
        if message.gaps:
            log.warning("the stored log has a gap", job=self._job.name, rank=session.rank)

    def look(self, now: float) -> None:
        """Keep logs for who is about to copy them, and let go of files that no set needs."""
        for session in self._sessions:
            if session.active:
                self._keep(session, now)
                self._drop(session)

    def _keep(self, session: Session, now: float) -> None:
        log, copied = session.log, session.logged_offset
        if all(commit.log_offset <= copied for commit in log.commits()[-1:]):
            self._caught_up_s[session.rank] = now
        elif now - self._caught_up_s[session.rank] > LATE_S:
            self._tell([session], f"storage is slow, {session.log_lag} bytes of the log wait for it")
        if not copied and self._pipe is not None and now - self._caught_up_s[session.rank] <= LATE_S:
            return  # the copier looks where its predecessor got to
        patient = session.log_lag < PATIENCE * log.segment_count * log.segment_bytes
        log.log_uncopied_from = max(copied, 1) if patient else 0

    def _drop(self, session: Session) -> None:
        oldest = min((one.log_offset for one in session.durable), default=0)
        if self._pipe is not None and oldest > self._dropped.get(session.rank, 0):
            self._dropped[session.rank] = oldest
            self._pipe.write(Drop(session.rank, oldest).encode())

    def _current(self) -> bool:
        return self._job.active_sessions() == self._sessions

    async def _follow_copier(self) -> str:
        """From its start to its end, which is ours once these workers are gone; how it ended."""
        run = self._settings.directory / self._job.name / self._run_of(self._sessions)
        process = await asyncio.create_subprocess_exec(
            *module_command("recovery.snapshots.log.log_copier"), str(run),
            "--parent", str(os.getpid()),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is proxyd's to handle
        )  # fmt: skip
        assert process.stdin is not None
        looking = asyncio.create_task(self._look_on())
        try:
            self._pipe = process.stdin
            ranks = tuple(Rank(s.rank, str(s.directory), s.threads) for s in self._sessions)
            self._pipe.write(Follow(self._sessions[0].device.partition(":")[0], ranks).encode())
            reading = asyncio.create_task(self._read(process))
            await asyncio.wait({looking, reading}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                return reading.result()
            reading.cancel()
            return "its workers have left"
        finally:  # what is under way is cut short, which readers know
            self._pipe = None
            looking.cancel()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), KILLED_S)

    async def _read(self, process: asyncio.subprocess.Process) -> str:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            message = decode(line)
            if isinstance(message, (Copied, Trouble)):
                self.take(message)
        return f"status {await process.wait()}"

    async def _look_on(self) -> None:
        while self._current():
            self.look(time.monotonic())
            await asyncio.sleep(LOOK_S)

    def _tell(self, sessions: Sequence[Session], reason: str) -> None:
        note = f"the log does not reach {self._settings.directory}: {reason}"
        for session in sessions:
            if not session.log_note:
                log.warning("a log is not durable", job=self._job.name, rank=session.rank, reason=reason)
            session.log_note = note
