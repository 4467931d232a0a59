"""An image of a worker that goes on: its processes and its log at one moment, as a move sends them.

It is stopped while CRIU dumps it and while the parts of its log that change with it are copied.  What only
grows is read while it runs on: whoever restores the image finds more there than it had, and writes it anew.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from understudy.protos import control_pb2 as pb
from understudy.recovery.migration.process.image_folders import ARRIVING
from understudy.recovery.migration.process.open_files import let_written_files_grow
from understudy.recovery.migration.relay.orders import OrderRefused
from understudy.recovery.migration.transfer.dumping import DumpedWorker, Dumping
from understudy.recovery.migration.transfer.moves import Moves
from understudy.recovery.migration.transfer.reception import NotSent
from understudy.recovery.migration.transfer.stream import StreamPart, extents, parts, read_ahead

log = structlog.get_logger()

PATIENCE_S = 60.0
"""So long the worker stands still at most, if this proxyd dies meanwhile."""
GROWING = ("segments", "snapshot")
"""Files of a log in which the image needs nothing that can change: what it needs is kept for its sake."""
SHADOW = "shadow"
"""Of no use without the device server's state of that moment."""
GROWS_BYTES = 256 << 20
"""Room for what comes into the log while it is read."""
CHUNK = 4 << 20


@dataclass(frozen=True)
class Image:
    """What is to be sent of a worker that runs again."""

    parts: AsyncIterator[pb.WorkerPart]
    paused_s: float
    """How long it stood still."""


@asynccontextmanager
async def image_of(
    moves: Moves, worker: DumpedWorker, running_again: Callable[[], None]
) -> AsyncIterator[Image]:
    """Takes an image of a worker that runs on.  `running_again` is called once it does.  Raises NotSent."""
    imaging = _Imaging(moves, worker, secrets.token_hex(16), PATIENCE_S)
    # Whoever asked may hang up; the worker must not stand still for that.
    taking = asyncio.ensure_future(imaging.take())
    taking.add_done_callback(lambda _: running_again())
    try:
        header, files, paused_s = await asyncio.shield(taking)
        async with aclosing(read_ahead(parts(header, files))) as stream:
            yield Image(stream, paused_s)
    finally:
        if not taking.done():
            await asyncio.wait({taking})
        await asyncio.to_thread(imaging.clear_away)


class _Imaging(Dumping):
    _folder: Path | None = None
    _lock = -1

    async def take(self) -> tuple[pb.WorkerHeader, list[StreamPart], float]:
        with self.alone():
            return await self._take()

    async def _take(self) -> tuple[pb.WorkerHeader, list[StreamPart], float]:
        await self.check()
        dumped = await self.dump()
        began = time.monotonic() - float(dumped["dump_s"])
        try:
            found = await asyncio.to_thread(self._keep, dumped)
        except OSError as problem:
            raise NotSent(f"no image of {self.who()} was taken: {problem.strerror or problem}") from problem
        finally:
            await self._go_on()
        return *found, time.monotonic() - began

    async def _go_on(self) -> None:
        try:
            await self.resume()
        except OrderRefused as problem:
            raise NotSent(f"{self.who()} does not go on after its image was taken: {problem}") from problem

    def _keep(self, dumped: dict[str, Any]) -> tuple[pb.WorkerHeader, list[StreamPart]]:
        """Raises OSError."""
        images = Path(str(dumped["images"]))
        # As of a worker that arrives: whatever proxyd starts after us removes it if nobody holds its lock.
        self._folder = Path(tempfile.mkdtemp(prefix=ARRIVING, dir=images.parent))
        self._lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        kept = images.rename(self._folder / "images")
        let_written_files_grow(kept)
        copies = self._folder / "log"
        copies.mkdir(mode=0o700)
        files, logs = [], []
        for path in sorted(path for path in self.worker.directory.iterdir() if path.is_file()):
            if path.name == SHADOW:
                files.append(StreamPart("log", path, sizes_only=True))
                continue
            if path.name not in GROWING:
                copy_data(path, copies / path.name)
                path = copies / path.name
            logs.append(path)
        dumped_images = sorted(kept.glob("*.img"))
        files += [StreamPart("image", path) for path in dumped_images] + [
            StreamPart("log", path) for path in logs
        ]
        # It grows when the worker runs on, and CRIU wants it as it was.
        files += [
            StreamPart("output", path, sizes_only=True, bytes=path.stat().st_size) for path in self.outputs()
        ]
        header = self.header_of_dump(dumped, dumped_images, logs)
        header.log_bytes += GROWS_BYTES
        return header, files

    def clear_away(self) -> None:
        """Nothing stays here."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def copy_data(source: Path, to: Path) -> None:
    """A file with its holes and its mode; raises OSError."""
    with open(source, "rb") as file, open(to, "xb") as copy:
        state = os.fstat(file.fileno())
        os.ftruncate(copy.fileno(), state.st_size)
        os.fchmod(copy.fileno(), state.st_mode & 0o777)
        for begin, end in extents(file.fileno(), state.st_size):
            while begin < end:
                data = os.pread(file.fileno(), min(CHUNK, end - begin), begin)
                if not data:
                    raise OSError(f"{source} has become shorter")
                begin += os.pwrite(copy.fileno(), data, begin)
