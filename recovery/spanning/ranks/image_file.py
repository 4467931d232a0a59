"""A CPU image on its leader's disk: the parts of a worker, one after the other, each behind its length."""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from understudy.protos import control_pb2 as pb
from understudy.recovery.membership.network.links import LARGEST_MESSAGE
from understudy.recovery.migration.transfer.header import MOST_BYTES, Refusal, check_form
from understudy.recovery.migration.transfer.stream import Checksum

MAGIC = b"understudy image 1\n"
SPARE_BYTES = 256 << 20
"""What is to be left where it goes: snapshots go there, too."""
_LENGTH = struct.Struct("<I")


class BadImage(Exception):
    """Its text is a sentence."""


@dataclass
class Taken:
    """An image that is complete."""

    path: Path
    header: pb.WorkerHeader
    bytes: int


def make_folder(folder: Path) -> None:
    """For our eyes only, with those above it that are ours; raises OSError."""
    for path in (folder.parent.parent.parent, folder.parent.parent, folder.parent, folder):
        path.mkdir(mode=0o700, exist_ok=True)


class ImageFile:
    """One that is being written; what comes is checked before it counts.  Everything raises BadImage."""

    def __init__(self, path: Path, job: str, rank: int) -> None:
        """Raises OSError."""
        self.path = path
        self._job, self._rank = job, rank
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = open(os.open(path, flags, 0o600), "wb")  # noqa: SIM115
        self._file.write(MAGIC)
        self.header = pb.WorkerHeader()
        self._inside: Checksum | None = None
        self._files = self.bytes = self.log_bytes = 0
        self._entry = pb.WorkerFile()
        self.complete = self._finished = False

    def take(self, part: pb.WorkerPart) -> None:
        """The next one; raises OSError."""
        self._check(part)
        data = part.SerializeToString()
        self._file.write(_LENGTH.pack(len(data)) + data)

    def _check(self, part: pb.WorkerPart) -> None:
        match part.WhichOneof("part"):
            case "header" if not self.header.version:
                self._check_header(part.header)
            case "file" if self.header.version and self._inside is None and not self.complete:
                self._files += 1
                self._entry, self._inside = part.file, Checksum()
                self.log_bytes += part.file.bytes if part.file.reserved else 0
            case "data" if self._inside is not None:
                self._inside.add(part.data.offset, part.data.data)
                self.bytes += len(part.data.data)
                if self._entry.kind == "log" and not self._entry.reserved:
                    self.log_bytes += len(part.data.data)
                if self.bytes > MOST_BYTES:
                    raise BadImage("it is too large")
            case "file_end" if self._inside is not None:
                if self._inside.value != part.file_end.checksum:
                    raise BadImage(f"{self._entry.name[:80]} has not the content that it was sent with")
                self._inside = None
            case "end" if self.header.version and self._inside is None and not self.complete:
                if (part.end.files, part.end.bytes) != (self._files, self.bytes):
                    raise BadImage("a part of it is missing")
                self.complete = True
            case _:
                raise BadImage("its parts are not in order")

    def _check_header(self, header: pb.WorkerHeader) -> None:
        try:
            check_form(header)
        except Refusal as problem:
            raise BadImage(str(problem)) from problem
        if (header.job, header.rank) != (self._job, self._rank):
            raise BadImage("it is of another rank")
        free = shutil.disk_usage(self.path.parent).free
        if free < header.image_bytes + SPARE_BYTES:
            wanted = header.image_bytes >> 20
            raise BadImage(f"{self.path.parent} has {free >> 20} MiB left, and over {wanted} are to come")
        self.header = header

    def finish(self) -> None:
        """Raises OSError; BadImage if a part is missing."""
        if not self.complete:
            raise BadImage("a part of it is missing")
        self._file.flush()
        self._finished = True

    def taken(self) -> Taken:
        """Once it is finished."""
        self.header.log_bytes = self.log_bytes
        return Taken(self.path, self.header, self.bytes)

    def close(self) -> None:
        """If it is not finished, it is of no use."""
        with contextlib.suppress(OSError):  # it has been flushed, or is removed
            self._file.close()
        if not self._finished:
            self.path.unlink(missing_ok=True)


def read_parts(path: Path, header: pb.WorkerHeader) -> Iterator[pb.WorkerPart]:
    """What was written, behind another header; raises OSError or BadImage."""
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise BadImage(f"{path} is no CPU image")
        yield pb.WorkerPart(header=header)
        first = True
        while prefix := file.read(_LENGTH.size):
            if len(prefix) < _LENGTH.size or (length := _LENGTH.unpack(prefix)[0]) > LARGEST_MESSAGE:
                raise BadImage(f"{path} is damaged")
            try:
                part = pb.WorkerPart.FromString(file.read(length))
            except DecodeError as problem:
                raise BadImage(f"{path} is damaged") from problem
            if not first:
                yield part
            first = False
