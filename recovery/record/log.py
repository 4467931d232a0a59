"""The record of one run of a job, in the cluster's store: batches, each written in pieces, in one order.

A piece is a key, `jobs/JOB/record/RUN/NUMBER`, and is written if there is none of its number and whoever
writes still leads.  So a write whose answer is lost is simply made again: it is the same piece.  A batch that
is the `first` says all; when it is there whole, what was before it goes.  Whatever is read may be of anybody.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from understudy.protos import control_pb2 as pb
from understudy.recovery.membership.job_leadership import records_of
from understudy.recovery.membership.records import BadRecord
from understudy.recovery.membership.stores.store import (
    ClusterStore,
    DeleteRange,
    Entry,
    Put,
    Unchanged,
)
from understudy.recovery.rendezvous.store import Change

VERSION = 1
"""Of JobRecordBatch; others are not read."""
PIECE_BYTES = 1 << 20
"""etcd takes 1.5 MiB in one request, unless it is told otherwise."""
MOST_BYTES = 512 << 20
"""Of a record that is read."""
_BEGINS, _ENDS = 1, 2
"""Bits of a piece's first byte: whether its batch begins or ends with it."""
_DIGITS = 16


def run_of(token: bytes) -> str:
    """A name for the run of a job that has that token, which it does not tell."""
    return hashlib.sha256(token).hexdigest()[:_DIGITS]


@dataclass
class Recorded:
    """What a record says."""

    kept: bool = False
    """Whether anything counts: there is a first batch, and it is whole."""
    changes: list[Change] = field(default_factory=list)
    """Those that make an empty store like that of the job's workers."""
    known: pb.JournaledJob = field(default_factory=pb.JournaledJob)
    images: pb.ImageSet | None = None
    over: str = ""
    """Why nobody may lead the job on by it."""
    next: int = 1
    """Number of the next piece."""

    def add(self, batch: pb.JobRecordBatch) -> None:
        """The next one; raises BadRecord."""
        if batch.version != VERSION:
            raise BadRecord(f"a part of it has version {batch.version}; this proxyd reads {VERSION}")
        if batch.first:
            self.kept, self.changes, self.images, self.over = True, [], None, ""
            self.known = pb.JournaledJob()
        self.changes += [
            Change(one.key, None if one.deleted else one.value, one.request, one.count)
            for one in batch.changes
        ]
        if batch.HasField("known"):
            self.known = batch.known
        if batch.HasField("images"):
            self.images = batch.images
        self.over = batch.over or self.over


@dataclass(frozen=True)
class Piece:
    """One key's worth; `former` goes as it is written."""

    number: int
    value: bytes
    former: DeleteRange | None = None


class RecordLog:
    """The record of the run whose token that is."""

    def __init__(self, store: ClusterStore, cluster: str, job: str, token: bytes) -> None:
        self._store = store
        self._prefix = f"{records_of(cluster, job)}{run_of(token)}/"

    def _key(self, number: int) -> str:
        return f"{self._prefix}{number:0{_DIGITS}d}"

    async def read(self) -> Recorded:
        """All of it; raises BadRecord, ClusterStoreError."""
        recorded, batch, size = Recorded(), bytearray(), 0
        expected = begun = 0
        for entry in (await self._store.list(self._prefix)).entries:
            number, size = self._number(entry), size + len(entry.value)
            if expected and number != expected:
                raise BadRecord("a piece of it is missing")
            if size > MOST_BYTES:
                raise BadRecord(f"it has more than {MOST_BYTES >> 20} MiB")
            expected = number + 1
            flags = entry.value[0] if entry.value else 0
            if flags & _BEGINS:  # whoever wrote those before it died amid them
                batch.clear()
                begun = number
            if not begun:
                raise BadRecord("a piece of it is missing")
            batch += entry.value[1:]
            if flags & _ENDS:
                recorded.add(_batch(batch))
                begun = 0
        recorded.next = max(expected, 1)
        return recorded

    async def next_number(self) -> int:
        """Number of the next piece, whatever those before it are; raises ClusterStoreError."""
        entries = (await self._store.list(self._prefix)).entries
        return max((_whole(entry.key.rpartition("/")[2]) for entry in entries), default=0) + 1

    def as_read(self, recorded: Recorded) -> Unchanged:
        """Condition: nothing has been added since."""
        return Unchanged(self._key(recorded.next), 0)

    def _number(self, entry: Entry) -> int:
        number = _whole(entry.key.removeprefix(self._prefix))
        if self._key(number) != entry.key:
            raise BadRecord("a key of it has another form")
        return number

    def pieces(self, batch: pb.JobRecordBatch, first: int) -> Iterator[Piece]:
        """A batch, in pieces numbered from `first` on."""
        data = batch.SerializeToString()
        count = max(-(-len(data) // PIECE_BYTES), 1)
        for index in range(count):
            ends = index == count - 1
            flags = (_BEGINS if index == 0 else 0) | (_ENDS if ends else 0)
            former = DeleteRange(self._key(0), self._key(first)) if ends and batch.first else None
            part = data[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]
            yield Piece(first + index, bytes([flags]) + part, former)

    async def write(self, piece: Piece, conditions: Sequence[Unchanged]) -> bool:
        """Whether it is there: written now or before; raises ClusterStoreError: nobody knows."""
        key = self._key(piece.number)
        changes: list[Put | DeleteRange] = [Put(key, piece.value)]
        changes += [piece.former] if piece.former is not None else []
        if await self._store.transact([*conditions, Unchanged(key, 0)], changes):
            return True
        there = await self._store.get(key)
        return there is not None and there.value == piece.value


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else 0


def _batch(data: bytearray) -> pb.JobRecordBatch:
    """Raises BadRecord."""
    try:
        return pb.JobRecordBatch.FromString(bytes(data))
    except DecodeError:
        raise BadRecord("a part of it cannot be decoded") from None
