"""proxyd's part of persistent snapshots: which sets go to storage, and when a step is complete on all ranks.

A set of snapshots in host memory that counts (recovery/snapshots.py) is offered here.  If one is due it is
leased, so that device servers keep its memory, and the job's writer copies it into stores.  It counts as
durable when every rank's part is; then older ones may go.  Trouble with storage is told in `recoveryctl
status` and never holds up training.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from recovery.jobs import Job, Session
from recovery.persistence.request import Discard, Persist, Release, Request, Written, decode_answer, encode
from recovery.persistence.settings import PersistenceSettings

log = structlog.get_logger()

RETRY_S = 10.0
"""After trouble with storage."""
SLOW_S = 60.0
"""A set that is under way for so long is told of; a disk may hang for ever."""
WRITER_THREADS = 2
"""Per snapshot (PCcheck, section 3.4: 2 to 4)."""


@dataclass
class Set:
    """A snapshot of all ranks on its way to storage."""

    serial: int
    run: str
    sessions: Sequence[Session]
    begun_s: float
    missing: set[int] = field(default_factory=set)
    failed: str = ""
    bytes: int = 0
    step: int = 0


class Persistence:
    """Of one job."""

    def __init__(self, job: Job, settings: PersistenceSettings) -> None:
        self._job = job
        self._settings = settings
        self._sets: dict[int, Set] = {}
        self._due_s = 0.0
        self._run = ""
        self._announced = 0
        self._pipe: asyncio.StreamWriter | None = None
        """To the writer, while there is one."""
        self._unsent: list[Request] = []
        self._wanted = asyncio.Event()

    def announce(self, serial: int, sessions: Sequence[Session], now: float) -> bool:
        """A set that is about to be ordered; true if it is to be described, as it will be taken.

        `now`: seconds.
        """
        run = run_name(sessions)
        if run != self._run:  # workers that were started again
            self._run, self._due_s = run, 0.0
            self._sets.clear()
        if now < self._due_s:
            return False
        if len(self._sets) >= self._settings.in_flight:
            self._complain_of_slowness(now)
            return False
        self._announced = serial
        for session in sessions:
            session.log.describe_snapshot(serial)
        return True

    def offer(self, serial: int, sessions: Sequence[Session], now: float) -> None:
        """A set that counts; taken if it was announced."""
        if serial != self._announced or run_name(sessions) != self._run:
            return
        self._announced = 0
        self._due_s = now + self._settings.every_s
        ranks = {session.rank for session in sessions}
        self._sets[serial] = Set(serial, self._run, sessions, now, missing=ranks)
        self._lease(sessions)
        self._send(Persist(serial, self._run, tuple(str(session.directory) for session in sessions)))

    def take(self, written: Written, now: float) -> None:
        """A rank's part is durable, or is not."""
        of = self._sets.get(written.serial)
        if of is None or written.rank not in of.missing:
            return
        of.missing.discard(written.rank)
        of.bytes += written.bytes
        of.step = max(of.step, written.step)
        of.failed = of.failed or written.error
        if of.missing:
            return
        del self._sets[of.serial]
        self._lease(of.sessions)
        if of.failed:
            self._send(Discard(of.serial, of.run))
            self._trouble(of.failed, now)
            return
        self._send(Release(of.serial, of.run))
        for session in of.sessions:
            session.persist_note = ""
            session.persisted_step = max(session.persisted_step, of.step)
        log.debug(
            "snapshot is durable", job=self._job.name, serial=of.serial, step=of.step, bytes=of.bytes,
            seconds=round(now - of.begun_s, 3),
        )  # fmt: skip

    async def run(self) -> None:
        """The writer, whenever there is something to write; until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                status = await self._follow_writer()
            except (OSError, ValueError) as problem:
                status = str(problem)
            for of in list(self._sets.values()):
                for rank in sorted(of.missing):
                    self.take(Written(of.serial, rank, error=f"its writer ended: {status}"), time.monotonic())

    async def _follow_writer(self) -> str:
        """From its start to its end; how it ended."""
        settings = self._settings
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "recovery.persistence.writer", str(settings.directory),
            "--job", self._job.name, "--slots", str(settings.slots), "--threads", str(WRITER_THREADS),
            "--parent", str(os.getpid()),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is proxyd's to handle
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        try:
            self._pipe = process.stdin
            for request in self._unsent:
                self._pipe.write(encode(request))
            self._unsent.clear()
            while line := await process.stdout.readline():
                self.take(decode_answer(line), time.monotonic())
            return f"status {await process.wait()}"
        finally:  # what is under way is cut short, which stores survive
            self._pipe = None
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _lease(self, sessions: Sequence[Session]) -> None:
        serials = sorted(self._sets)
        for session in sessions:
            if session.active:
                session.log.lease_snapshots(serials)

    def _complain_of_slowness(self, now: float) -> None:
        longest = now - min(of.begun_s for of in self._sets.values())
        if longest > SLOW_S:
            self._tell(f"its storage is slow, one has been under way for {SLOW_S:.0f} s and more")

    def _trouble(self, reason: str, now: float) -> None:
        self._due_s = max(self._due_s, now + RETRY_S)
        self._tell(reason)

    def _tell(self, reason: str) -> None:
        note = f"no snapshot reaches {self._settings.directory}: {reason}"
        for session in self._job.active_sessions():
            if session.persist_note != note:
                session.persist_note = note
                log.warning("a snapshot is not durable", job=self._job.name, rank=session.rank, reason=reason)

    def _send(self, request: Request) -> None:
        if self._pipe is not None:
            self._pipe.write(encode(request))
        else:
            self._unsent.append(request)
            self._wanted.set()


def run_name(sessions: Sequence[Session]) -> str:
    """Of one start of all workers; the same for a proxyd that adopted them."""
    directory = sessions[0].directory
    return f"{directory.parent.parent.name}.{directory.name}"
