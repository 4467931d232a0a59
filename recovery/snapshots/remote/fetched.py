"""Parts of a set that were fetched from the second tier into files of their payload."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from typing_extensions import Buffer

from understudy import replay
from understudy.recovery.snapshots._store import StoreError
from understudy.recovery.snapshots.remote.mirror_manifest import MirroredPart, MirroredSet
from understudy.recovery.snapshots.stores.catalogue import StoredPart, StoredSet


@dataclass(frozen=True)
class FetchedPart(StoredPart):
    """`path` is a file with the payload, once it was fetched; `sequence` means nothing."""

    content: MirroredPart
    chunk_bytes: int

    def open(self) -> FetchedPayload:
        """For reading; raises OSError or StoreError."""
        return FetchedPayload(self)


class FetchedStream:
    """A payload that is read from its beginning to its end."""

    def __init__(self, payload: memoryview) -> None:
        self._payload, self._offset = payload, 0

    def read_into(self, into: Buffer) -> None:
        """The next bytes."""
        view = memoryview(into).cast("B")
        view[:] = self._payload[self._offset : self._offset + len(view)]
        self._offset += len(view)


class FetchedPayload:
    """Answers as a Store does that holds this part alone."""

    def __init__(self, part: FetchedPart) -> None:
        """Raises OSError or StoreError."""
        self._part, self._extents = part, part.content.extents
        with open(part.path, "rb") as file:
            count = os.fstat(file.fileno()).st_size
            if count != part.bytes:
                raise StoreError(f"{part.path} has {count} bytes, not {part.bytes}")
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if count else None
        self._payload = memoryview(self._map) if self._map is not None else memoryview(b"")

    def extents(self, sequence: int) -> list[tuple[int, int, int]]:
        """(kind, id, bytes) of each."""
        return [(row.kind, row.id, row.bytes) for row in self._extents]

    def layout(self, sequence: int) -> list[tuple[int, int, int, int]]:
        """(kind, id, bytes, offset) of each."""
        return [(row.kind, row.id, row.bytes, row.offset) for row in self._extents]

    def read(self, sequence: int, index_of_extent: int, into: Buffer) -> None:
        """Fills `into`, which must have the extent's size; its digest was checked when it was fetched."""
        row = self._extents[index_of_extent]
        self._copy(row.offset, into)

    def read_all(self, sequence: int, into: Sequence[Buffer]) -> None:
        """Fills a buffer per extent."""
        for index, buffer in enumerate(into):
            self.read(sequence, index, buffer)

    def read_into(
        self, sequence: int, extents: Sequence[tuple[int, int]], area: Buffer, *, in_place: bool = False
    ) -> None:
        """Extents to offsets in `area`: (index, offset)."""
        view = memoryview(area).cast("B")
        for index, offset in extents:
            self.read(sequence, index, view[offset : offset + self._extents[index].bytes])

    def digests(self, sequence: int) -> list[int]:
        """It has digests of chunks, and of no extent."""
        return [0] * len(self._extents)

    def stream(self, sequence: int) -> FetchedStream:
        """The payload from its beginning to its end."""
        return FetchedStream(self._payload)

    def _copy(self, offset: int, into: Buffer) -> None:
        view = memoryview(into).cast("B")
        view[:] = self._payload[offset : offset + len(view)]

    def verify(self, sequence: int) -> list[int]:
        """Those chunks that are not what they were."""
        step = self._part.chunk_bytes
        return [
            index
            for index, digest in enumerate(self._part.content.digests)
            if replay.digest(bytes(self._payload[index * step : (index + 1) * step])) != digest
        ]

    def close(self) -> None:
        """Everything after it fails."""
        self._payload.release()
        if self._map is not None:
            self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def as_stored(mirrored: MirroredSet, folder: Path) -> StoredSet:
    """Its parts as they lie in `folder` once they are fetched."""
    of = mirrored.of
    parts = {
        part.rank: FetchedPart(
            folder / part.name, 0, part.rank, mirrored.step, part.bytes, mirrored.time_ns, part,
            mirrored.chunk_bytes,
        )
        for part in mirrored.parts
    }  # fmt: skip
    return StoredSet(of.job, of.run, of.serial, len(parts), parts)
