"""What a set in the second tier consists of: JSON, written last, and read as hostile."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from understudy import replay
from understudy.recovery.base.hostile_json import convert, read_plain
from understudy.recovery.snapshots.remote.second_tier import PART, SetName
from understudy.recovery.snapshots.stores.layout import is_name

FORMAT = "understudy-snapshot"
VERSION = 1
CHUNK_BYTES = 16 << 20
"""Of payload per digest: also what is read and written at a time."""
LARGEST_CHUNK = 256 << 20
LARGEST_MANIFEST = 256 << 20
_MOST = (1 << 63) - 1


@dataclass(frozen=True)
class Extent:
    """A row of the extent table (docs/snapshot-format.md); bytes, and offset in the payload."""

    kind: int
    id: int
    bytes: int
    offset: int


@dataclass(frozen=True)
class MirroredPart:
    """A rank's payload, in a file called `name`."""

    rank: int
    name: str
    bytes: int
    extents: tuple[Extent, ...]
    digests: tuple[int, ...]
    """XXH3-64 of each chunk."""


@dataclass(frozen=True)
class MirroredSet:
    """A set of all ranks in the second tier."""

    of: SetName
    step: int
    """Optimizer steps done."""
    time_ns: int
    """When the last part was durable in its store, nanoseconds since 1970."""
    chunk_bytes: int
    parts: tuple[MirroredPart, ...]
    """By rank: 0, 1, …"""

    @property
    def bytes(self) -> int:
        """The bytes of all parts."""
        return sum(part.bytes for part in self.parts)


def encode_manifest(stored: MirroredSet) -> bytes:
    """JSON; its last entry is the XXH3-64 of the rest."""
    fields = {
        "format": FORMAT, "version": VERSION,
        "job": stored.of.job, "run": stored.of.run, "serial": stored.of.serial,
        "step": stored.step, "time_ns": stored.time_ns, "chunk_bytes": stored.chunk_bytes,
        "parts": [
            {
                "rank": part.rank, "file": part.name, "bytes": part.bytes,
                "extents": [[e.kind, e.id, e.bytes, e.offset] for e in part.extents],
                "digests": [f"{digest:016x}" for digest in part.digests],
            }
            for part in stored.parts
        ],
    }  # fmt: skip
    return json.dumps(fields | {"digest": _digest(fields)}).encode()


def decode_manifest(content: bytes, of: SetName) -> MirroredSet:
    """Reads the manifest of a set that lies where `of` says; raises ValueError."""
    try:
        fields = read_plain(content)
        told, wanted = fields.pop("digest"), _digest(fields)
    except (KeyError, ValueError, RecursionError) as problem:
        raise ValueError("it is cut off, or no manifest") from problem
    if fields.pop("format", None) != FORMAT or told != wanted:
        raise ValueError("it is not what it was")
    if (version := fields.pop("version", None)) != VERSION:
        raise ValueError(f"it is of version {version!r}; this release reads {VERSION}")
    try:
        found = convert(fields, _Manifest).checked()
    except ValueError as problem:
        raise ValueError(f"it makes no sense ({problem})") from problem
    if found.of != of:
        raise ValueError("it is of another set")
    return found


def chunks_of(count: int, chunk_bytes: int) -> int:
    """How many digests a payload has."""
    return -(-count // chunk_bytes)


def _digest(fields: Mapping[str, Any]) -> str:
    return f"{replay.digest(json.dumps(fields, sort_keys=True).encode()):016x}"


Count = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As it is written."""

    rank: int
    file: str
    bytes: Count
    extents: tuple[tuple[int, int, Count, Count], ...]
    digests: tuple[str, ...]

    def checked(self, rank: int, chunk_bytes: int) -> MirroredPart:
        """Raises ValueError."""
        digests = tuple(int(digest, 16) for digest in self.digests)
        if self.rank != rank or not PART.fullmatch(self.file):
            raise ValueError(f"part {rank} is called otherwise")
        if len(digests) != chunks_of(self.bytes, chunk_bytes):
            raise ValueError(f"part {rank} has {len(digests)} digests")
        end = 0
        for kind, number, length, offset in self.extents:
            if offset < end or offset + length > self.bytes:
                raise ValueError("an extent lies outside its payload")
            if not (0 <= kind < 1 << 64 and 0 <= number < 1 << 64):
                raise ValueError("an extent that there cannot be")
            end = offset + length
        return MirroredPart(rank, self.file, self.bytes, tuple(Extent(*row) for row in self.extents), digests)


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As it is written."""

    job: str
    run: str
    serial: Annotated[int, msgspec.Meta(ge=1, le=_MOST)]
    step: Count
    time_ns: Count
    chunk_bytes: Annotated[int, msgspec.Meta(ge=1, le=LARGEST_CHUNK)]
    parts: tuple[_Part, ...]

    def checked(self) -> MirroredSet:
        """Raises ValueError."""
        parts = tuple(part.checked(rank, self.chunk_bytes) for rank, part in enumerate(self.parts))
        if not parts or not is_name(self.job) or not is_name(self.run):
            raise ValueError("no ranks, or a bad name")
        of = SetName(self.job, self.run, self.serial)
        return MirroredSet(of, self.step, self.time_ns, self.chunk_bytes, parts)
