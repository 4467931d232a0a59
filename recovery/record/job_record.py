"""Keeps the record of a job that we lead: what has changed is written before it has consequences.

An answer of the workers' store is given, and what a recovery has decided is done, once the record has what
they follow from: so whoever leads the job next knows of it.  Before `begin` and behind `end` there is no
record, nobody could lead the job on, and nothing waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import structlog

from understudy.protos import control_pb2 as pb
from understudy.recovery.membership.job_leadership import Leading
from understudy.recovery.membership.stores.store import ClusterStoreError, Unchanged
from understudy.recovery.record.log import VERSION, Piece, RecordLog
from understudy.recovery.rendezvous.store import Change, Store

log = structlog.get_logger()

AGAIN_S = 0.2
SPARE_BYTES = 4 << 20
"""What a record may have beyond twice what it had when it was last written from the beginning."""
MOST_STORE_BYTES = 64 << 20
"""Of a workers' store in a record: etcd has 2 GiB for everybody, former revisions included."""


class NoRecord(Exception):
    """There is no record; its text says why."""


class JobRecord:
    """Writes it, one batch after the other; what comes meanwhile is the next one."""

    def __init__(
        self, job: str, log: RecordLog, leading: Leading, store: Callable[[], Store | None],
        known: Callable[[], pb.JournaledJob],
    ) -> None:  # fmt: skip
        """`store`: of the job's workers, on this host; `known`: what else is known of the job."""
        self._job, self._log, self._leading = job, log, leading
        self._store, self._known = store, known
        self.kept = False
        """Whether whatever has consequences is written first."""
        self._told: Store | None = None
        self._pending = pb.JobRecordBatch()
        self._written = pb.JournaledJob()
        """What is known of the job, as it is written, or will be."""
        self._images: pb.ImageSet | None = None
        self._anew = False
        """Whether the next batch says all."""
        self._bytes = self._bytes_anew = 0
        self._pieces: deque[Piece] = deque()
        """Numbered, and to be written as they are: an attempt may have succeeded unheard."""
        self._next = 0
        """Number of the next piece; 0: not known yet."""
        self._writing = asyncio.Lock()
        self._noted = self._durable = 0
        """How many changes there were, and how many of them are written."""
        self._trouble = ""
        """Why the newest attempt has failed."""

    # ------------------------------------------------------------------ from when to when
    async def begin(self) -> None:
        """Write all, and what changes from here on; raises NoRecord."""
        if self._told is not None:
            return
        store = self._store()
        if store is None:
            raise NoRecord("the job was not started with proxyrun --migratable")
        if store.bytes > MOST_STORE_BYTES:
            raise NoRecord(_too_large())
        self.kept = self._anew = True
        self._noted += 1
        self._follow(store)
        await self.settle()

    def go_on(self, next_piece: int, images: pb.ImageSet | None, known: pb.JournaledJob) -> None:
        """We follow another host, whose record ours is from here on; `next_piece`: where it ended."""
        self.kept, self._next, self._images, self._written = True, next_piece, images, known
        store = self._store()
        if store is None:
            return self._end("the host that leads it has no worker that was started with --migratable")
        self._follow(store)

    def follow_predecessor(self, images: pb.ImageSet | None) -> None:
        """A proxyd before us led the job from here.

        Its record goes on, and says all anew, if the `images` that it names are still there; else it ends.
        """
        store = self._store()
        if images is None or store is None:
            self._end("proxyd of the host that leads it was started anew, and there are no newer CPU images")
            return
        self.kept, self._images, self._anew = True, images, True
        self._noted += 1
        self._follow(store)

    async def end(self, why: str) -> None:
        """Nobody may lead the job on by the record: once this returns."""
        if self.kept:
            self._end(why)
            await self.settle()

    def _end(self, why: str) -> None:
        self._forget()
        self.kept, self._images, self._anew = True, None, False
        self._pending = pb.JobRecordBatch(version=VERSION, first=True, over=why)
        self._noted += 1

    def _follow(self, store: Store) -> None:
        self._told = store
        store.tell_changes(self._changed)

    def _forget(self) -> None:
        if self._told is not None:
            self._told.tell_changes(None)
        self._told = None

    def close(self) -> None:
        """The job is over."""
        self._forget()
        self.kept = False

    # ------------------------------------------------------------------ what is written
    def _changed(self, change: Change) -> None:
        self._pending.changes.append(_stored(change))
        self._noted += 1

    async def name(self, images: pb.ImageSet) -> None:
        """These count: once this returns."""
        self._images = images
        self._pending.images.CopyFrom(images)
        self._noted += 1
        await self.settle_known()

    async def settle_known(self) -> None:
        """Until what is known of the job is written, too."""
        if self.kept and self._told is not None and (known := self._known()) != self._written:
            self._pending.known.CopyFrom(known)
            self._written = known
            self._noted += 1
        await self.settle()

    async def settle(self) -> None:
        """Until all that has changed so far is written, if there is a record.

        Without the cluster's store this waits: nobody is failed by that.
        """
        mine = self._noted
        while self.kept and self._durable < mine:
            async with self._writing:
                if self._durable < mine:  # else somebody before us has written it with what is his own
                    await self._write_all()

    async def _write_all(self) -> None:
        """What has changed by now; what comes meanwhile is for the next one."""
        if self._next == 0:
            await self._find_end()
        if not self.kept:
            return  # the job is over
        self._cut()
        noted = self._noted
        while self._pieces:
            await self._write(self._pieces[0])
            if not self.kept:
                return
            self._pieces.popleft()
        self._durable = noted
        if self._told is None and self._durable == self._noted:
            self.kept = False  # its end is written

    def _cut(self) -> None:
        """What is pending becomes a batch that is written as it is."""
        if self._told is not None and self._told.bytes > MOST_STORE_BYTES:
            self._end(_too_large())
        if self._bytes > 2 * self._bytes_anew + SPARE_BYTES and self._told is not None:
            self._anew = True
        if self._anew:
            self._pending = self._all()
        if not self._pending.ByteSize():
            return
        batch, self._pending = self._pending, pb.JobRecordBatch()
        batch.version = VERSION
        pieces = list(self._log.pieces(batch, self._next))
        size = sum(len(piece.value) for piece in pieces)
        self._bytes = size if batch.first else self._bytes + size
        self._bytes_anew = size if batch.first else self._bytes_anew
        self._next += len(pieces)
        self._pieces.extend(pieces)
        self._anew = False

    def _all(self) -> pb.JobRecordBatch:
        assert self._told is not None
        self._written = self._known()
        changes = [_stored(change) for change in self._told.changes()]
        batch = pb.JobRecordBatch(first=True, changes=changes, known=self._written)
        if self._images is not None:
            batch.images.CopyFrom(self._images)
        return batch

    async def _find_end(self) -> None:
        """Where a proxyd before us has ended."""
        while self.kept:
            if self._leading.holds.is_set():
                try:
                    self._next = await self._log.next_number()
                    return
                except ClusterStoreError as problem:
                    self._cannot(problem)
            await asyncio.sleep(AGAIN_S)

    async def _write(self, piece: Piece) -> None:
        """Until it is there, and we lead; if another host leads, that is never."""
        while self.kept:
            if self._leading.holds.is_set():
                try:
                    leads = Unchanged(self._leading.key, self._leading.token)
                    if await self._log.write(piece, [leads]):
                        self._trouble = ""
                        return
                except ClusterStoreError as problem:
                    self._cannot(problem)
            await asyncio.sleep(AGAIN_S)

    def _cannot(self, problem: ClusterStoreError) -> None:
        if not self._trouble:
            log.warning("a job's record waits for the cluster's store", job=self._job, problem=str(problem))
        self._trouble = str(problem)

    @property
    def waits(self) -> bool:
        """Whether it cannot be written for the moment."""
        return self.kept and bool(self._trouble or not self._leading.holds.is_set())


def _too_large() -> str:
    return f"the torch.distributed store of its workers has more than {MOST_STORE_BYTES >> 20} MiB"


def _stored(change: Change) -> pb.StoredKey:
    return pb.StoredKey(
        key=change.key, value=change.value or b"", deleted=change.value is None, request=change.request,
        count=change.count,
    )  # fmt: skip
