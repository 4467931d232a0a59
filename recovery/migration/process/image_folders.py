"""Where images of workers lie for a while, and what is removed of them that nobody needs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from understudy.recovery.machine.runtime_directory import SHARED_MEMORY

ARRIVING = "understudy-arriving-"
"""Directories of images; locked while somebody receives them."""


def place_for(wanted: int, named: Path | None) -> Path:
    """A directory with room for images: shared memory if memory allows, else $TMPDIR; raises OSError."""
    if named is not None:
        return named
    if shutil.disk_usage(SHARED_MEMORY).free > 2 * wanted and _memory_free() > 3 * wanted:
        return SHARED_MEMORY
    return Path(tempfile.gettempdir())


def remove_unfinished(place: Path) -> None:
    """What has been arriving when a proxyd died."""
    for path in place.glob(f"{ARRIVING}*"):
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.getuid():
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _memory_free() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0
