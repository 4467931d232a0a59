"""What a set in the second tier consists of: JSON, written last, and read as hostile."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from understudy import replay
from understudy.recovery.snapshots.remote.second_tier import PART, SetName
from understudy.recovery.snapshots.stores.layout import is_name

FORMAT = "understudy-snapshot"
VERSION = 1
CHUNK_BYTES = 16 << 20
"""Of payload per digest: also what is read and written at a time."""
LARGEST_CHUNK = 256 << 20
LARGEST_MANIFEST = 256 << 20
_MOST = 1 << 63


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
        fields = json.loads(content)
        told = fields.pop("digest")
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as problem:
        raise ValueError("it is cut off, or no manifest") from problem
    if fields.get("format") != FORMAT or told != _digest(fields):
        raise ValueError("it is not what it was")
    if fields.get("version") != VERSION:
        raise ValueError(f"it is of version {fields.get('version')!r}; this release reads {VERSION}")
    try:
        found = _read(fields)
    except (KeyError, TypeError, ValueError) as problem:
        raise ValueError(f"it makes no sense ({problem})") from problem
    if found.of != of:
        raise ValueError("it is of another set")
    return found


def chunks_of(count: int, chunk_bytes: int) -> int:
    """How many digests a payload has."""
    return -(-count // chunk_bytes)


def _digest(fields: Mapping[str, Any]) -> str:
    return f"{replay.digest(json.dumps(fields, sort_keys=True).encode()):016x}"


def _read(fields: Mapping[str, Any]) -> MirroredSet:
    chunk_bytes = _number(fields["chunk_bytes"], 1, LARGEST_CHUNK)
    parts = tuple(_read_part(part, rank, chunk_bytes) for rank, part in enumerate(fields["parts"]))
    if not parts or not is_name(fields["job"]) or not is_name(fields["run"]):
        raise ValueError("no ranks, or a bad name")
    of = SetName(fields["job"], fields["run"], _number(fields["serial"], 1))
    return MirroredSet(of, _number(fields["step"]), _number(fields["time_ns"]), chunk_bytes, parts)


def _read_part(part: Mapping[str, Any], rank: int, chunk_bytes: int) -> MirroredPart:
    count = _number(part["bytes"])
    digests = tuple(int(digest, 16) for digest in part["digests"])
    if part["rank"] != rank or not PART.fullmatch(part["file"]):
        raise ValueError(f"part {rank} is called otherwise")
    if len(digests) != chunks_of(count, chunk_bytes):
        raise ValueError(f"part {rank} has {len(digests)} digests")
    return MirroredPart(rank, part["file"], count, _read_extents(part["extents"], count), digests)


def _read_extents(rows: Sequence[Sequence[Any]], count: int) -> tuple[Extent, ...]:
    extents, end = [], 0
    for row in rows:
        kind, number, length, offset = (_number(value, most=1 << 64) for value in row)
        if offset < end or offset + length > count:
            raise ValueError("an extent lies outside its payload")
        extents.append(Extent(kind, number, length, offset))
        end = offset + length
    return tuple(extents)


def _number(value: Any, least: int = 0, most: int = _MOST) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{str(value)[:40]!r} is no number that can be here")
    return value
