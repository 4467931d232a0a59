"""proxyd's part of the second tier: which set is copied there next, and that its slots stay meanwhile.

A set that is complete in the local stores is offered here.  The job's uploader gets the newest one whenever
it is ready; those that came and went meanwhile are skipped, and counted.  A remote that is down, slow or
hangs is told of in `recoveryctl status`, and holds up neither training nor the local stores.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from understudy.recovery.base.own_modules import module_command
from understudy.recovery.base.timing import TIMING, Timing
from understudy.recovery.snapshots.remote.mirror_messages import (
    Copied,
    Copy,
    Failed,
    Moved,
    Ready,
    Target,
    decode_answer,
)
from understudy.recovery.snapshots.settings import MirrorSettings, PersistenceSettings
from understudy.recovery.state.jobs import Job, Session

log = structlog.get_logger()

END_WITHIN_S = 5.0
"""A process that was killed; longer if its file system hangs."""


@dataclass(frozen=True)
class CompleteSet:
    """A set that is complete in the local stores."""

    serial: int
    run: str
    sessions: Sequence[Session]


class Mirroring:
    """Mirrors the sets of one job."""

    def __init__(
        self, job: Job, local: PersistenceSettings, settings: MirrorSettings, let_go: Callable[[], None],
        timing: Timing = TIMING,
    ) -> None:  # fmt: skip
        """`let_go` is called when slots that were held need not be any more."""
        self._job, self._local, self._settings, self._let_go = job, local, settings, let_go
        self._timing = timing
        self._newest: CompleteSet | None = None
        """Not copied yet, and not handed out."""
        self._under_way: CompleteSet | None = None
        self._ready = False
        self._busy_since_s = 0.0
        """When it last said something, or was told to."""
        self._pipe: asyncio.StreamWriter | None = None
        self._wanted = asyncio.Event()

    def held(self, run: str) -> int:
        """Serial of the set of that run whose slots must stay; 0: of none."""
        return self._under_way.serial if self._under_way and self._under_way.run == run else 0

    def offer(self, durable: CompleteSet) -> None:
        """A set is complete, and newer than all before."""
        if self._newest is not None:
            self._job.mirror.skipped += 1
        self._newest = durable
        self._wanted.set()
        self._hand_out()

    def take(self, message: Ready | Moved | Copied | Failed) -> None:
        """From the uploader."""
        if isinstance(message, Ready):
            self._ready = True
            self._hand_out()
        elif isinstance(message, Moved):
            self._job.mirror.bytes += message.bytes
        elif isinstance(message, Failed):
            self._give_up(message.error)
        elif self._under_way is not None and message.serial == self._under_way.serial:
            self._finish(self._under_way, message)

    async def run(self) -> None:
        """The uploader, whenever there is something to copy; until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                reason = await self._follow_uploader()
            except (OSError, ValueError) as problem:
                reason = str(problem)
            self._ready = False
            self._give_up(f"its uploader ended: {reason}")
            await asyncio.sleep(self._timing.uploader_again_s)

    async def _follow_uploader(self) -> str:
        """From its start to its end; how it ended."""
        process = await asyncio.create_subprocess_exec(
            *module_command("recovery.snapshots.remote.uploader"), str(self._local.directory),
            "--job", self._job.name, "--parent", str(os.getpid()),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is proxyd's to handle
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        hangs_s = self._timing.uploader_hangs_s
        try:
            self._pipe, self._busy_since_s = process.stdin, time.monotonic()
            to = self._settings
            self._pipe.write(Target(to.url, to.keeps.keep_last, to.keeps.keep_every).encode())
            while True:
                try:
                    async with asyncio.timeout(hangs_s):
                        line = await process.stdout.readline()
                except TimeoutError:
                    if self._ready or time.monotonic() < self._busy_since_s + hangs_s:
                        continue
                    return f"it handed over nothing for {hangs_s:.0f} s"
                if not line:
                    return f"status {await process.wait()}"
                self._busy_since_s = time.monotonic()
                self.take(decode_answer(line))
        finally:  # what is under way is cut short, and does not count
            self._pipe = None
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), END_WITHIN_S)

    def _hand_out(self) -> None:
        if self._ready and self._newest is not None and self._pipe is not None:
            self._ready, self._under_way, self._newest = False, self._newest, None
            self._busy_since_s = time.monotonic()
            self._pipe.write(Copy(self._under_way.serial, self._under_way.run).encode())

    def _finish(self, copied: CompleteSet, message: Copied) -> None:
        self._under_way = None
        self._job.mirror.copied += 1
        for session in copied.sessions:
            session.mirror_note = ""
            session.mirrored_step = max(session.mirrored_step, message.step)
        log.debug(
            "snapshot is in the second tier", job=self._job.name, serial=message.serial, step=message.step,
            bytes=message.bytes, seconds=round(message.seconds, 3),
        )  # fmt: skip
        self._let_go()

    def _give_up(self, reason: str) -> None:
        """For now: the set is tried again unless there is a newer one by then."""
        self._job.mirror.failures += 1
        what = "no snapshot reaches" if self._newest or self._under_way else "not all is well at"
        if self._under_way is not None:
            if self._newest is None:
                self._newest = self._under_way
                self._wanted.set()
            else:
                self._job.mirror.skipped += 1
            self._under_way = None
            self._let_go()
        note = f"{what} {self._settings.url}: {reason}"
        for session in self._job.active_sessions():
            if session.mirror_note != note:
                session.mirror_note = note
                log.warning("a snapshot was not copied", job=self._job.name, rank=session.rank, reason=reason)
