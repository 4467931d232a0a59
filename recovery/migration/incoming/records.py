"""What is written down of workers from other hosts, one file each, in proxyd's runtime directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import structlog
from google.protobuf.message import DecodeError

from understudy.protos import control_pb2 as pb
from understudy.recovery.base.whole_file import read_whole, write_whole
from understudy.recovery.migration.transfer.header import Refusal, check_form

log = structlog.get_logger()

FOLDER = "incoming.d"
"""A name that no job has: they have no dots."""
LARGEST = 4 << 20


class IncomingRecords:
    """The records of one proxyd."""

    def __init__(self, runtime: Path) -> None:
        self._folder = runtime / FOLDER

    def write(self, record: pb.IncomingRecord) -> None:
        """Before it has consequences; raises OSError."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        write_whole(self._folder / record.header.move, record.SerializeToString())

    def remove(self, move: str) -> None:
        """It is not here any more."""
        (self._folder / move).unlink(missing_ok=True)

    def read(self) -> Iterator[pb.IncomingRecord]:
        """Those that make sense."""
        for path in sorted(self._folder.glob("*")) if self._folder.is_dir() else ():
            try:
                record = pb.IncomingRecord.FromString(read_whole(path, LARGEST))
                check_form(record.header)
                if record.header.move == path.name:
                    yield record
            except (OSError, DecodeError, Refusal) as problem:
                log.error("what is known of a worker from another host is of no use", path=str(path),
                          problem=str(problem))  # fmt: skip
