"""A worker as a stream of parts: what is told of it, then what is in its files, without holes and zeros."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from understudy import replay
from understudy.protos import control_pb2 as pb

Part = TypeVar("Part")

CHUNK = 1 << 20
"""Bytes of a message."""
ZEROS = bytes(CHUNK)


@dataclass(frozen=True)
class StreamPart:
    """A file to be sent."""

    kind: str
    path: Path
    sizes_only: bool = False
    """Only its size: the content stays."""
    bytes: int = -1
    """What that is to be, if it has changed."""


def extents(file: int, size: int) -> Iterator[tuple[int, int]]:
    """Where a file has content: (begin, end)."""
    position = 0
    while position < size:
        try:
            begin = os.lseek(file, position, os.SEEK_DATA)
        except OSError as problem:
            if problem.errno == errno.ENXIO:  # nothing but a hole
                return
            raise
        if begin >= size:
            return
        position = min(os.lseek(file, begin, os.SEEK_HOLE), size)
        yield begin, position


class Checksum:
    """A checksum over pieces of a file: XXH3 of the one before, of where a piece is, and of what is in it.

    Against damage; that nobody forges what comes is TLS's part.
    """

    def __init__(self) -> None:
        self.value = 0

    def add(self, offset: int, data: bytes) -> None:
        """The next piece."""
        self.value = replay.digest(b"".join((
            self.value.to_bytes(8, "little"), offset.to_bytes(8, "little"), data,
        )))  # fmt: skip


def parts(header: pb.WorkerHeader, files: list[StreamPart]) -> Iterator[pb.WorkerPart]:
    """Each file is read once; raises OSError."""
    yield pb.WorkerPart(header=header)
    total = 0
    for part in files:
        file = os.open(part.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            state, checksum = os.fstat(file), Checksum()
            size = state.st_size if part.bytes < 0 else part.bytes
            mode = stat.S_IMODE(state.st_mode)
            reserved = part.kind == "log" and 0 < size <= state.st_blocks * 512
            entry = pb.WorkerFile(
                kind=part.kind, name=part.path.name, bytes=size, mode=mode, reserved=reserved
            )
            yield pb.WorkerPart(file=entry)
            for begin, end in () if part.sizes_only else extents(file, size):
                for offset in range(begin, end, CHUNK):
                    data = os.pread(file, min(CHUNK, end - offset), offset)
                    if part.kind == "log" and data == ZEROS:
                        continue
                    checksum.add(offset, data)
                    total += len(data)
                    yield pb.WorkerPart(data=pb.WorkerData(offset=offset, data=data))
            yield pb.WorkerPart(file_end=pb.WorkerFileEnd(checksum=checksum.value))
        finally:
            os.close(file)
    yield pb.WorkerPart(end=pb.WorkerEnd(files=len(files), bytes=total))


async def read_ahead(found: Iterator[pb.WorkerPart]) -> AsyncGenerator[pb.WorkerPart]:
    """The next part is read, in a thread, while one is under way."""
    following = asyncio.ensure_future(asyncio.to_thread(next, found, None))
    try:
        while (part := await following) is not None:
            following = asyncio.ensure_future(asyncio.to_thread(next, found, None))
            yield part
    finally:
        await asyncio.wait({following})


def data_bytes(paths: list[Path]) -> int:
    """What files hold, holes left out; raises OSError."""
    return sum(os.stat(path).st_blocks * 512 for path in paths)


class Outgoing(Generic[Part]):
    """What a call sends, and why it ended early: grpc.aio tells of that as of a call that was cancelled."""

    def __init__(self, parts: AsyncIterator[Part]) -> None:
        self._parts = parts
        self.problem: Exception | None = None

    async def __aiter__(self) -> AsyncIterator[Part]:
        try:
            async for part in self._parts:
                yield part
        except Exception as problem:
            self.problem = problem
            raise
