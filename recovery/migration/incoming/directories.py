"""Runtime directories of other hosts' proxyds that are needed here, at the same paths, for their workers."""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from understudy.recovery.machine.runtime_directory import ALIVE, RuntimeDirectory, lock_directory
from understudy.recovery.migration.transfer.header import Refusal

MARK = "for-incoming"
"""In a directory that is another host's: its name tells nothing of processes here."""


@dataclass
class _Held:
    lock: int
    users: int = 0


class IncomingDirectories:
    """Each is locked while it has users, as its own proxyd would have it, and removed with the last."""

    def __init__(self, own: Path) -> None:
        self._own = own
        self._held: dict[Path, _Held] = {}

    def enter(self, path: Path) -> None:
        """One more user; raises Refusal."""
        if path == self._own:
            return
        if path not in self._held:
            try:
                path.mkdir(mode=0o700)
            except OSError as problem:
                raise Refusal(f"{path} cannot be made: {problem.strerror}") from problem
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
            (path / MARK).touch(mode=0o600)
            self._held[path] = _Held(lock)
        self._held[path].users += 1

    def take_over(self, path: Path) -> None:
        """Takes the directory of a proxyd that died; one more user.  Raises OSError."""
        if path == self._own:
            return
        if path not in self._held:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                lock_directory(lock)
            except OSError:
                os.close(lock)
                raise
            self._held[path] = _Held(lock)
        self._held[path].users += 1

    def remove_abandoned(self) -> None:
        """What a proxyd that died was receiving here."""
        for path in self._own.parent.glob(f"understudy-{os.getuid()}-*"):
            if path in self._held or not (path / MARK).exists():
                continue
            with contextlib.suppress(OSError):
                left = RuntimeDirectory.take_over(path)
                if left.has_servers():
                    left.release()
                else:
                    left.remove()

    def leave(self, path: Path) -> None:
        """One less."""
        held = self._held.get(path)
        if held is None:
            return
        held.users -= 1
        if held.users == 0:
            for name in (ALIVE, MARK):
                (path / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # what is in there is not ours
                path.rmdir()
            os.close(held.lock)
            del self._held[path]
