"""Reads the parts of a stored set, and finds bytes that another rank has written."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import msgspec

from understudy import replay
from understudy.recovery.base.hostile_json import read
from understudy.recovery.snapshots._store import StoreError
from understudy.recovery.snapshots.restore.manifest import BufferRow, read_manifest
from understudy.recovery.snapshots.stores.catalogue import StoredPart, StoredSet
from understudy.recovery.snapshots.stores.kinds import (
    BUFFER,
    CLIENT_STATE,
    CONTENT,
    GENERATOR,
    MANIFEST,
    OTHER_HOLDERS,
    ROW,
)
from understudy.recovery.snapshots.stores.layout import in_use

_OTHER_HOLDERS = msgspec.json.Decoder(dict[int, tuple[int, int]])


class Damaged(ValueError):
    """What is wrong with a stored snapshot, in a sentence."""


@dataclass(frozen=True)
class Place:
    """Where a buffer's bytes lie: an extent of a rank's part."""

    rank: int
    index: int
    bytes: int


class PartReader:
    """One rank's part, open."""

    def __init__(self, part: StoredPart) -> None:
        """Raises OSError, StoreError or Damaged."""
        self.part = part
        self.store = part.open()
        self._contents: list[bytearray] = []
        try:
            self._extents = {  # in their order
                (kind, number): Place(part.rank, index, count)
                for index, (kind, number, count) in enumerate(self.store.extents(part.sequence))
            }
            self.other_holders = self._read_other_holders()
            self.buffers = self._read_buffers()
        except BaseException:
            self.store.close()
            raise

    def own(self, handle: int) -> Place | None:
        """Where it wrote that buffer itself."""
        return self._extents.get((BUFFER, handle))

    def generator(self, number: int, count: int) -> Place:
        """Where a generator's state of that many bytes lies; raises Damaged."""
        place = self._extents.get((GENERATOR, number))
        if place is None or place.bytes != count:
            raise Damaged(f"the state of generator {number} of rank {self.part.rank} is missing")
        return place

    def tables(self) -> tuple[bytes, bytes]:
        """The commit's row and the manifest; raises OSError, StoreError or Damaged."""
        return self._table(MANIFEST, ROW), self._table(MANIFEST, CONTENT)

    def read_to(self, area: memoryview, wanted: Mapping[Place, int], in_place: bool) -> None:
        """Extents to offsets in an area, of which nothing else is used; raises OSError or StoreError."""
        if wanted:
            places = [(place.index, offset) for place, offset in wanted.items()]
            self.store.read_into(self.part.sequence, places, area, in_place=in_place)

    @cached_property
    def digests(self) -> Sequence[int]:
        """That reading an extent compares its content with, by index; raises OSError or StoreError."""
        return self.store.digests(self.part.sequence)

    def read(self, place: Place) -> bytearray:
        """Raises OSError or StoreError."""
        if self._contents:
            return self._contents[place.index]
        content = bytearray(place.bytes)
        self.store.read(self.part.sequence, place.index, content)
        return content

    def read_ahead(self) -> None:
        """All of it, into memory: small extents share chunks, so one by one takes a hundred times as long.

        Raises OSError or StoreError.
        """
        contents = [bytearray(place.bytes) for place in self._extents.values()]
        self.store.read_all(self.part.sequence, contents)
        self._contents = contents

    def description(self) -> bytes:
        """What the worker said of it; empty if nothing."""
        place = self._extents.get((CLIENT_STATE, 0))
        return bytes(self.read(place)) if place is not None else b""

    def _table(self, kind: int, number: int) -> bytes:
        if (kind, number) not in self._extents:
            raise Damaged("its tables are missing")
        return bytes(self.read(self._extents[kind, number]))

    def _read_other_holders(self) -> Mapping[int, tuple[int, int]]:
        content = self._table(OTHER_HOLDERS, 0)
        try:
            return read(content, _OTHER_HOLDERS)
        except ValueError as problem:
            raise Damaged("its table of what other ranks hold makes no sense") from problem

    def _read_buffers(self) -> Mapping[int, BufferRow]:
        content = self._table(MANIFEST, CONTENT)
        try:
            rows = read_manifest(content)
        except ValueError as problem:
            raise Damaged(str(problem)) from problem
        return {row.handle: row for row in rows if row.kept}


class SetReader(contextlib.ExitStack):
    """All parts of a complete set, open until the block ends."""

    def __init__(self, stored: StoredSet) -> None:
        self._stored = stored
        self.parts: dict[int, PartReader] = {}
        super().__init__()

    def __enter__(self) -> Self:
        """Raises OSError, StoreError or Damaged."""
        with contextlib.ExitStack() as opened:
            for run in {part.path.parent for part in self._stored.parts.values()}:
                opened.enter_context(in_use(run))
            for rank, part in sorted(self._stored.parts.items()):
                self.parts[rank] = PartReader(part)
                opened.callback(self.parts[rank].store.close)
            self.push(opened.pop_all())
        return self

    def part(self, rank: int) -> PartReader:
        """One rank's; raises Damaged."""
        if rank not in self.parts:
            raise Damaged(f"the part of rank {rank} is missing")
        return self.parts[rank]

    def place(self, rank: int, handle: int) -> Place:
        """Where a rank's buffer lies; raises Damaged."""
        row = self.parts[rank].buffers.get(handle)
        if row is None:
            raise Damaged(f"rank {rank} has no buffer {handle}")
        holder, other = self.parts[rank].other_holders.get(handle, (rank, handle))
        found = self.parts[holder].own(other) if holder in self.parts else None
        if found is None or found.bytes != row.bytes:
            raise Damaged(f"buffer {handle} of rank {rank} is not where it should be (rank {holder})")
        return found

    def buffer(self, rank: int, handle: int) -> bytes:
        """Its bytes, checked against the manifest's digest; raises OSError, StoreError or Damaged."""
        place = self.place(rank, handle)
        content = bytes(self.parts[place.rank].read(place))
        if replay.content_digest(content) != self.parts[rank].buffers[handle].digest:
            raise Damaged(f"buffer {handle} of rank {rank} is not what it was")
        return content


__all__ = ["Damaged", "PartReader", "Place", "SetReader", "StoreError"]
