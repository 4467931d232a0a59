"""The writer's view of ranks' snapshot areas."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from understudy import replay

KEPT_S = 5.0
"""How long an area stays mapped: a file that was removed keeps its memory until then."""


IN_PLACE = 0.75
"""Share of an area in huge pages with which direct I/O there is faster than a copy."""


def in_place(log: replay.Log) -> bool:
    """Whether storage is best written from, and read into, a log's area itself."""
    return log.snapshot_huge_bytes > IN_PLACE * log.snapshot_used_bytes


class MappedAreas:
    """Areas that were read lately stay mapped.

    To map one anew for each snapshot costs a page fault for every 64 KiB, and as much again to unmap it:
    together about as much processor time as copying it.
    """

    def __init__(self, kept_s: float = KEPT_S) -> None:
        self._kept_s = kept_s
        self._lock = threading.Lock()
        self._areas: dict[Path, tuple[tuple[int, int, int], memoryview]] = {}
        self._timer: threading.Timer | None = None

    def area(self, directory: Path) -> memoryview:
        """The content of a rank's `snapshot`; raises OSError or LogError."""
        with open(directory / "snapshot", "rb") as file, self._lock:
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino, status.st_size)
            known, area = self._areas.get(directory, (None, memoryview(b"")))
            if known != identity:
                area = memoryview(replay.MappedArea(str(directory / "snapshot")))
                self._areas[directory] = identity, area
            self._forget_later()
            return area

    def _forget_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(self._kept_s, self._forget)
        self._timer.daemon = True
        self._timer.start()

    def _forget(self) -> None:
        """Whoever still reads one holds it."""
        with self._lock:
            self._areas.clear()
