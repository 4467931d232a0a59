"""A worker that arrives, part by part.  Whatever comes from another host is checked before it is believed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path

from understudy.protos import control_pb2 as pb
from understudy.recovery.migration.transfer.header import MOST_BYTES, OUTPUTS, PLAIN_NAME, Places, Refusal
from understudy.recovery.migration.transfer.stream import Checksum

MOST_FILES = 20_000
MODE = 0o777
SPARE_BYTES = 64 << 20
"""What is to be left where it goes."""
PART_S = 60.0


class Delivery:
    """Receives one worker: what it has made is removed by `discard`, unless it was taken over."""

    def __init__(self, header: pb.WorkerHeader, found: Places, images: Path, at_home: bool) -> None:
        """`images`: a directory of ours, which is there; `at_home`: the relay's directory is, too."""
        self.header, self.places, self.images = header, found, images
        self._folders = {"image": images, "log": found.log, "output": found.relay}
        self._at_home = at_home
        self._file = -1
        self._checksum = Checksum()
        self._entry = pb.WorkerFile()
        self._position = 0
        self._known: set[tuple[str, str]] = set()
        self._left = {"image": header.image_bytes, "log": header.log_bytes, "output": MOST_BYTES}
        self._turn = threading.Lock()
        self._lock = -1
        self._made: list[Path] = []
        self._discarded = False
        self.bytes = 0
        self.complete = False

    def begin(self) -> None:
        """Make its directories, if there is room; raises Refusal."""
        for kind, folder in (("image", self.images.parent), ("log", self.places.runtime)):
            state = os.statvfs(folder)
            free = state.f_bavail * state.f_frsize
            if free < self._left[kind] + SPARE_BYTES:
                raise Refusal(f"{folder} has {free >> 20} MiB left, and {self._left[kind] >> 20} are to come")
        with self._turn:
            self._make_directories()

    def _make_directories(self) -> None:
        if self._discarded:
            raise Refusal("it is not awaited any more")
        try:
            self._lock = os.open(self.images, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for folder in (self.places.log, *(() if self._at_home else (self.places.relay,))):
                folder.parent.mkdir(mode=0o700, exist_ok=True)
                folder.mkdir(mode=0o700)
                self._made.append(folder)
        except OSError as problem:
            raise Refusal(f"{problem.filename} cannot be made: {problem.strerror}") from problem

    def take(self, part: pb.WorkerPart) -> None:
        """The next one; raises Refusal."""
        with self._turn:
            if self._discarded:
                raise Refusal("it is not awaited any more")
            self._take(part)

    def _take(self, part: pb.WorkerPart) -> None:
        try:
            match part.WhichOneof("part"):
                case "file" if self._file < 0 and not self.complete:
                    self._open(part.file)
                case "data" if self._file >= 0:
                    self._write(part.data)
                case "file_end" if self._file >= 0:
                    self._finish(part.file_end)
                case "end" if self._file < 0 and not self.complete:
                    self._end(part.end)
                case _:
                    raise Refusal("its parts are not in order")
        except OSError as problem:
            where = self._folders.get(self._entry.kind, self.images)
            where = self.images.parent if where == self.images else where
            if problem.errno in (errno.ENOSPC, errno.EDQUOT):
                raise Refusal(f"{where} is full") from problem
            raise Refusal(f"{where} cannot be written: {problem.strerror}") from problem

    def _open(self, entry: pb.WorkerFile) -> None:
        key = entry.kind, entry.name
        known_output = entry.kind != "output" or entry.name in OUTPUTS
        if entry.kind not in self._folders or not PLAIN_NAME.fullmatch(entry.name) or not known_output:
            raise Refusal("it brings a file that has no place here")
        if key in self._known or len(self._known) >= MOST_FILES or entry.bytes > MOST_BYTES:
            raise Refusal("it brings too many files, or one twice, or one that is too large")
        if entry.reserved and (entry.kind != "log" or entry.bytes > self._left["log"]):
            raise Refusal("it reserves more than was announced")
        self._known.add(key)
        self._entry, self._checksum, self._position = entry, Checksum(), 0
        path = self._folders[entry.kind] / entry.name
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        if not (entry.kind == "output" and self._at_home):
            flags |= os.O_CREAT | os.O_EXCL
        self._file = os.open(path, flags, 0o600)
        if entry.kind == "output" and self._at_home:
            self._position = os.fstat(self._file).st_size  # what has arrived already comes not again
        else:
            os.ftruncate(self._file, entry.bytes)
            if entry.reserved:
                os.posix_fallocate(self._file, 0, entry.bytes)
                self._left["log"] -= entry.bytes
            os.fchmod(self._file, entry.mode & MODE)

    def _write(self, piece: pb.WorkerData) -> None:
        kind, data, offset = self._entry.kind, piece.data, piece.offset
        if not self._entry.reserved:
            self._left[kind] -= len(data)
        if not data or offset + len(data) > self._entry.bytes or self._left[kind] < 0:
            raise Refusal(f"more of {self._entry.name} comes than was announced")
        if kind == "output" and self._at_home and offset > self._position:
            raise Refusal(f"a part of {self._entry.name} is missing")
        if offset < self._position and not (kind == "output" and self._at_home):
            raise Refusal("its parts are not in order")
        self._checksum.add(offset, data)
        skipped = max(0, self._position - offset) if kind == "output" else 0
        view = memoryview(data)[skipped:]
        offset += skipped
        while view:
            written = os.pwrite(self._file, view, offset)
            view, offset = view[written:], offset + written
        self._position = max(self._position, piece.offset + len(data))
        self.bytes += len(data)

    def _finish(self, end: pb.WorkerFileEnd) -> None:
        if self._checksum.value != end.checksum:
            raise Refusal(f"{self._entry.name} has not the content that it was sent with")
        if os.fstat(self._file).st_size != self._entry.bytes:
            raise Refusal(f"a part of {self._entry.name} is missing")
        self._close()

    def _end(self, end: pb.WorkerEnd) -> None:
        if (end.files, end.bytes) != (len(self._known), self.bytes):
            raise Refusal("a part of it is missing")
        self.complete = True

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def drop_images(self) -> None:
        """They were restored."""
        with self._turn:
            self._close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        shutil.rmtree(self.images, ignore_errors=True)

    def take_over(self) -> None:
        """What a predecessor of this proxyd received."""
        self._made = [self.places.log, self.places.relay]

    def discard(self) -> None:
        """Nothing of it stays."""
        with self._turn:  # who is cancelled leaves its thread behind
            self._discarded = True
        self.drop_images()
        for folder in self._made:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # others of the job are there
                folder.parent.rmdir()


async def following(parts: AsyncIterator[pb.WorkerPart]) -> pb.WorkerPart | None:
    """The next one; raises Refusal if the source has fallen silent."""
    try:
        async with asyncio.timeout(PART_S):
            return await anext(parts, None)
    except TimeoutError:
        raise Refusal("its source has fallen silent") from None
