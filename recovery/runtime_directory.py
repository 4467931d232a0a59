"""/dev/shm/understudy-UID-PID-XXXX: logs and server sockets of one proxyd; gone when it is."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path

from recovery.processes import start_ticks

SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"understudy-(\d+)-(\d+)-(\d+)-\w+")


class RuntimeDirectory:
    """Made at start, locked while we live, removed at the end."""

    def __init__(self, parent: Path = SHARED_MEMORY) -> None:
        prefix = f"understudy-{os.getuid()}-{os.getpid()}-{start_ticks(os.getpid())}-"
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def rank_directory(self, job: str, rank: int, opening: int) -> Path:
        """A fresh directory for one session's log."""
        path = self.path / job / f"rank-{rank}-{opening}" if opening else self.path / job / f"rank-{rank}"
        path.mkdir(mode=0o700, parents=True)
        return path

    def remove_job(self, job: str) -> None:
        """Forget a job's files."""
        shutil.rmtree(self.path / job, ignore_errors=True)

    def remove(self) -> None:
        """Leave nothing behind."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_leftovers(parent: Path = SHARED_MEMORY) -> list[Path]:
    """Remove what proxyds that are dead left behind; answers what was removed.

    Dead: no process of that pid and start time, and nobody holds the lock (a proxyd in another pid
    namespace that shares /dev/shm is alive although we cannot see its pid).
    """
    removed: list[Path] = []
    for path in sorted(parent.glob(f"understudy-{os.getuid()}-*")):
        found = _NAME.fullmatch(path.name)
        if not found or start_ticks(int(found[2])) == int(found[3]):
            continue
        with contextlib.suppress(OSError):
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
            finally:
                os.close(lock)
    return removed
