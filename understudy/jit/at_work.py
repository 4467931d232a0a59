"""How ranks learn that another one is at work while they wait for it: one file that all of them share.

A rank that evaluates, or writes a checkpoint of its own, keeps the others waiting at the next collective for
as long as that takes. It is late, and does not hang. Whoever has been at work for a while writes into the
file each second; whoever waits sees that it changes. A rank that is stopped, or hangs in C with the GIL held,
writes nothing. Clocks are not compared, and however many ranks there are, each opens one file a second.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

EVERY = 1.0
"""Seconds between two writes, and two reads; fewer where a stall may not last much longer."""
_LONGEST = 128


class AtWork:
    """This rank's hold on the file. `say` is told once if it cannot be used. Called by one thread alone."""

    def __init__(self, path: Path, rank: int, say: Callable[[str], None], every: float = EVERY) -> None:
        self._path, self._rank, self._say, self._every = path, rank, say, every
        self._written = self._read = float("-inf")
        self._count = 0
        self._last: bytes | None = None
        self._broken = False

    def tell(self, now: float) -> None:
        """This rank is at work. `now`: seconds of a monotonic clock."""
        if self._broken or now - self._written < self._every:
            return
        self._written, self._count = now, self._count + 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            number = os.open(self._path, flags, 0o600)
            try:
                os.pwrite(number, f"{self._rank} {os.getpid()} {self._count}".ljust(_LONGEST).encode(), 0)
            finally:
                os.close(number)  # NFS: who opens it behind this sees what was written
        except OSError as error:
            self._give_up(error)

    def heard(self, now: float) -> bool:
        """Whether any rank has written since the last look."""
        if self._broken or now - self._read < self._every:
            return False
        self._read = now
        try:
            text = self._content()
        except OSError as error:
            self._give_up(error)
            return False
        last, self._last = self._last, text
        return last is not None and text != last

    def _content(self) -> bytes:
        try:
            number = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return b""
        try:
            return os.pread(number, _LONGEST, 0)
        finally:
            os.close(number)

    def _give_up(self, error: OSError) -> None:
        self._broken = True
        self._say(
            f"ranks cannot tell one another that they are at work ({error}), so one that works alone for "
            "longer than minimum_stall is taken for one that hangs."
        )
