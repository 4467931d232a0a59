"""The stored log of a rank: files of frames behind a set of snapshots (docs/stored-log.md).

Pure but for reading; log_copier.py writes.  What a crash or a bad sector leaves is a prefix that ends in a
commit, or is refused.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, BinaryIO

import msgspec

from understudy import replay
from understudy.recovery.base.hostile_json import convert, read_plain

VERSION = 1
_FORMAT = "understudy-log"
_HEAD = struct.Struct("<4sIQQ")
"""Magic, kind, number, bytes of content; XXH3-64 follows."""
_DIGEST = struct.Struct("<Q")
_FREES = struct.Struct("<IIQ")
"""Bytes of the row, number of frees, bytes of the manifest."""
_MAGIC = b"USLG"
FRAME_BYTES = _HEAD.size + _DIGEST.size
MOST_BYTES = 1 << 30
"""Of a frame's content."""
SEGMENT_LIMITS = (4096, 1 << 30)
"""Bytes; replay/csrc/log/log_map.cpp: create_log checks the rest."""
LARGEST_DICTIONARY = 1 << 40


class Kind(IntEnum):
    """What a frame holds, and what its number says."""

    ABOUT = 1
    """JSON; the log offset with which the file begins."""
    TEMPLATES = 2
    """Bytes of the dictionary; id of the first."""
    RECORDS = 3
    """Bytes of the log; offset of the first."""
    DESCRIPTION = 4
    """What the worker calls its buffers, or what has changed of that; the step."""
    COMMIT = 5
    """Row, frees and manifest; the log offset where execution goes on.  All before it is durable with it."""
    END = 6
    """A sentence why the log goes on elsewhere, or not at all; the offset behind it."""


class BadLog(ValueError):
    """Why a stored log is of no use, in a sentence."""


class About(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Says what the file is, and what a log must be like to hold it."""

    job: str
    run: str
    rank: Annotated[int, msgspec.Meta(ge=0)]
    world: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    driver: Annotated[str, msgspec.Meta(pattern=r"\A(cpu|cuda)\Z")]
    threads: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
    segment_bytes: Annotated[int, msgspec.Meta(ge=SEGMENT_LIMITS[0], le=SEGMENT_LIMITS[1])]
    dictionary_bytes: Annotated[int, msgspec.Meta(ge=1, le=LARGEST_DICTIONARY)]

    def encode(self) -> bytes:
        """As a frame holds it."""
        return json.dumps({"format": _FORMAT, "version": VERSION} | msgspec.structs.asdict(self)).encode()


@dataclass(frozen=True)
class StoredCommit:
    """A commit and what its place in the log does not say."""

    commit: replay.Commit
    frees: tuple[int, ...]
    row: bytes
    manifest: bytes


@dataclass(frozen=True)
class Frame:
    """Checked; `end`: where the next one begins in the file."""

    kind: Kind
    number: int
    content: bytes
    end: int


def ends_step(commit: replay.Commit) -> bool:
    """Whether it lies right behind an optimizer's step, where snapshots are taken."""
    return commit.call == 0 and not commit.optimizer


class Chain:
    """Frames one behind the other; each digest covers the one before, so that none can be missing."""

    def __init__(self) -> None:
        self._digest = 0

    def encode(self, kind: Kind, number: int, content: bytes) -> bytes:
        """The next frame."""
        head = _HEAD.pack(_MAGIC, kind, number, len(content))
        self._digest = replay.digest(b"".join((_DIGEST.pack(self._digest), head, content)))
        return b"".join((head, _DIGEST.pack(self._digest), content))

    def continues_with(self, head: bytes, digest: int, content: bytes) -> bool:
        """Whether that is the next frame; then it is."""
        if replay.digest(b"".join((_DIGEST.pack(self._digest), head, content))) != digest:
            return False
        self._digest = digest
        return True


def read_frames(file: BinaryIO, size: int) -> Iterator[Frame]:
    """From the file's beginning, until one is not whole; raises OSError."""
    chain, position = Chain(), 0
    while size - position >= FRAME_BYTES:
        start = file.read(FRAME_BYTES)
        if len(start) < FRAME_BYTES:
            return
        head, (digest,) = start[: _HEAD.size], _DIGEST.unpack_from(start, _HEAD.size)
        magic, kind, number, count = _HEAD.unpack(head)
        position += FRAME_BYTES
        if (
            magic != _MAGIC
            or kind not in Kind.__members__.values()
            or count > min(size - position, MOST_BYTES)
        ):
            return
        content = file.read(count)
        if len(content) < count or not chain.continues_with(head, digest, content):
            return
        position += count
        yield Frame(Kind(kind), number, content, position)


def read_about(frame: Frame) -> About:
    """Reads the first frame; raises BadLog."""
    try:
        told = read_plain(frame.content)
        if frame.kind is not Kind.ABOUT or told.pop("format", None) != _FORMAT:
            raise BadLog("it is no stored log")
        if (version := told.pop("version", None)) != VERSION:
            raise BadLog(f"it has version {version}, this release reads version {VERSION}")
        about = convert(told, About)
    except BadLog:
        raise
    except ValueError as problem:
        raise BadLog("its first frame makes no sense") from problem
    if about.rank >= about.world:
        raise BadLog("its first frame makes no sense")
    return about


def encode_commit(copied: replay.CopiedCommit) -> bytes:
    """As a frame holds it."""
    frees = struct.pack(f"<{len(copied.frees)}Q", *copied.frees)
    head = _FREES.pack(len(copied.row), len(copied.frees), len(copied.manifest))
    return b"".join((head, copied.row, frees, copied.manifest))


def read_commit(content: bytes) -> StoredCommit:
    """Raises BadLog."""
    try:
        rows, frees, manifest = _FREES.unpack_from(content)
        if len(content) != _FREES.size + rows + 8 * frees + manifest:
            raise BadLog("a commit in it makes no sense")
        row = content[_FREES.size : _FREES.size + rows]
        at = _FREES.size + rows
        handles = struct.unpack_from(f"<{frees}Q", content, at)
        return StoredCommit(replay.describe_row(row), handles, row, content[at + 8 * frees :])
    except (struct.error, replay.LogError) as problem:
        raise BadLog("a commit in it makes no sense") from problem
