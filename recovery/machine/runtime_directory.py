"""understudy-UID-PID-START-XXXX in shared memory: logs, sockets of servers and the journal of one proxyd.

A proxyd that dies leaves it behind.  Whoever holds its lock may adopt what is in there, or remove it.  A
proxyrun has one, too, in which the proxyd that it brings along listens.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from understudy.recovery.machine.processes import is_same_process, start_ticks

SHARED_MEMORY = Path(os.environ.get("UNDERSTUDY_SHARED_MEMORY") or "/dev/shm")
ALIVE = "alive"
"""Of this file every living device server holds a shared lock (proxy_server/guardian.py)."""
TRIES, TRY_PAUSE_S = 5, 0.01
_NAME = re.compile(r"understudy-(\d+)-(\d+)-(\d+)-\w+")


class RuntimeDirectory:
    """Locked while we live, removed at the end."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def make(cls, parent: Path = SHARED_MEMORY) -> RuntimeDirectory:
        """A new one."""
        prefix = f"understudy-{os.getuid()}-{os.getpid()}-{start_ticks(os.getpid())}-"
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return cls(path, lock)

    @classmethod
    def take_over(cls, path: Path) -> RuntimeDirectory:
        """Takes a dead proxyd's directory; raises OSError if somebody has its lock, or it is not ours."""
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(lock).st_uid != os.getuid():
                raise PermissionError(f"{path} belongs to another user")
            lock_directory(lock)
        except OSError:
            os.close(lock)
            raise
        return cls(path, lock)

    def has_servers(self) -> bool:
        """Whether a device server lives that was started for it."""
        try:
            alive = os.open(self.path / ALIVE, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(alive)
        return False

    def rank_directory(self, job: str, rank: int, opening: int) -> Path:
        """A fresh directory for one session's log."""
        path = self.path / job / f"rank-{rank}-{opening}" if opening else self.path / job / f"rank-{rank}"
        path.mkdir(mode=0o700, parents=True)
        return path

    def relays(self, job: str) -> Path:
        """Where relays of its workers keep what they need.

        A short name, as a socket's path has 107 bytes at most, and one that no job has: they have no dots.
        """
        return self.path / f"r.{hashlib.sha256(job.encode()).hexdigest()[:8]}"

    def remove_job(self, job: str) -> None:
        """Forget a job's files."""
        for path in (self.path / job, self.relays(job)):
            shutil.rmtree(path, ignore_errors=True)

    def release(self) -> None:
        """Leave it to others."""
        os.close(self._lock)

    def remove(self) -> None:
        """Leave nothing behind."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def lock_directory(directory: int) -> None:
    """Raises BlockingIOError.  A waiting worker may hold it for an instant, to know whether proxyd lives."""
    for _ in range(TRIES):
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(TRY_PAUSE_S)
    fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)


def abandoned(parent: Path = SHARED_MEMORY) -> Iterator[RuntimeDirectory]:
    """What proxyds that are dead left behind, locked by us.

    Dead: no process of that pid and start time but a zombie, which a container's init may never reap, and
    nobody holds the lock (a proxyd in another pid namespace that shares /dev/shm lives, unseen).
    """
    for path in sorted(parent.glob(f"understudy-{os.getuid()}-*")):
        found = _NAME.fullmatch(path.name)
        if not found or is_same_process(int(found[2]), int(found[3])):
            continue
        with contextlib.suppress(OSError):
            yield RuntimeDirectory.take_over(path)
