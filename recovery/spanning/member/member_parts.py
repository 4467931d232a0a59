"""A member's side of snapshots on storage: its writer, and who waits for what it says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from understudy.protos import control_pb2 as pb
from understudy.recovery.snapshots.settings import PersistenceSettings
from understudy.recovery.snapshots.stores.layout import is_name
from understudy.recovery.snapshots.writing.part_writer import PartWriter
from understudy.recovery.snapshots.writing.request import Discard, Release, Written
from understudy.recovery.state.jobs import Job, Session
from understudy.recovery.state.span import Stored

NO_STORAGE = "its proxyd was started without --persist"


class MemberParts:
    """Writes the parts of one job that another host leads."""

    def __init__(
        self,
        job: Job,
        settings: PersistenceSettings | None,
        keep: Callable[[Coroutine[Any, Any, None]], None],
        note: Callable[[], None],
    ) -> None:
        """`keep` runs the writer for as long as the job lasts; `note` writes down what is stored."""
        self._job, self._settings, self._keep, self._note = job, settings, keep, note
        self._writer: PartWriter | None = None
        self._waiting: dict[tuple[str, int], asyncio.Queue[Written]] = {}

    async def write(
        self, request: pb.WritePartsRequest, sessions: Sequence[Session]
    ) -> AsyncIterator[pb.WrittenPart]:
        """Writes parts of these sessions, which run here; raises ValueError if the request makes no sense."""
        run, serial = named(request)
        if (run, serial) in self._waiting:
            raise ValueError(f"snapshot {serial} is being written already")
        if self._settings is None:
            for session in sessions:
                yield pb.WrittenPart(rank=session.rank, error=NO_STORAGE)
            return
        answers = self._waiting[run, serial] = asyncio.Queue()
        missing = {session.rank for session in sessions}
        try:
            self._written_by(self._settings).persist(serial, run, sessions, request.known)
            while missing:
                written = await answers.get()
                missing.discard(written.rank)
                self._tell(written)
                yield pb.WrittenPart(
                    rank=written.rank, step=written.step, bytes=written.bytes, seconds=written.seconds,
                    error=written.error, gone=written.gone,
                )  # fmt: skip
        finally:
            del self._waiting[run, serial]

    def conclude(self, request: pb.ConcludeSetRequest) -> None:
        """What has become of a set; raises ValueError."""
        run, serial = named(request)
        if self._writer is not None:
            self._writer.tell(Release(serial, run) if request.complete else Discard(serial, run))
        if request.complete and self._settings is not None and self._job.span is not None and request.step:
            self._job.span.stored = Stored(request.step, self._settings.directory / self._job.name / run)
            self._note()

    def rest(self) -> None:
        """Nothing more is written."""
        if self._writer is not None:
            self._writer.dismiss()

    def _written_by(self, settings: PersistenceSettings) -> PartWriter:
        if self._writer is None:
            self._writer = PartWriter(self._job.name, settings, self._take)
            self._keep(self._writer.run())
        return self._writer

    def _take(self, written: Written) -> None:
        waiting = self._waiting.get((written.run, written.serial))
        if waiting is not None:
            waiting.put_nowait(written)
        if written.error and not written.gone and self._writer is not None:
            self._writer.dismiss()

    def _tell(self, written: Written) -> None:
        """In `status` of this host, too."""
        session = self._job.sessions.get(written.rank)
        if session is not None and self._settings is not None and not written.gone:
            note = f"no snapshot reaches {self._settings.directory}: {written.error}"
            session.persist_note = note if written.error else ""


def named(request: Any) -> tuple[str, int]:
    """Run and serial of a set; raises ValueError: they become names of files."""
    if not is_name(request.run) or not request.serial:
        raise ValueError(f"{request.run[:80]!r} is no name for a run, or {request.serial} no serial")
    return request.run, request.serial
