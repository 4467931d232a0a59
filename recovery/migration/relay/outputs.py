"""Output of a worker whose relay is on another host: what grows is read on, what has arrived is let go."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from pathlib import Path

from understudy.recovery.migration.transfer.header import OUTPUTS

IN_MODIFY, HOLE = 0x2, 0x3
"""HOLE: FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE."""
CHUNK = 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)


class Outputs:
    """In the directory of a relay."""

    def __init__(self, directory: Path, changed: asyncio.Event) -> None:
        """`changed` is set whenever there may be more."""
        self._files: dict[str, int] = {}
        for name in OUTPUTS:
            with contextlib.suppress(FileNotFoundError):
                self._files[name] = os.open(directory / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._changed = changed
        self._watch = _libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        _libc.inotify_add_watch(self._watch, os.fsencode(directory), IN_MODIFY)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._watch, self._noticed)
        self._let_go = dict.fromkeys(self._files, 0)

    def _noticed(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._watch, 1 << 16)
        self._changed.set()

    def read(self, positions: dict[str, int]) -> tuple[str, int, bytes] | None:
        """A piece that follows one of these positions."""
        for name, file in self._files.items():
            offset = positions.get(name, 0)
            if data := os.pread(file, CHUNK, offset):
                return name, offset, data
        return None

    def let_go(self, name: str, position: int) -> None:
        """What lies before it has arrived where it is wanted."""
        if name not in self._files:
            return
        page = os.sysconf("SC_PAGESIZE")
        end = min(position, os.fstat(self._files[name]).st_size) // page * page
        begin, self._let_go[name] = self._let_go[name], max(self._let_go[name], end)
        if end > begin:
            _libc.fallocate(self._files[name], HOLE, ctypes.c_long(begin), ctypes.c_long(end - begin))

    def close(self) -> None:
        """Once."""
        self._loop.remove_reader(self._watch)
        for file in (self._watch, *self._files.values()):
            os.close(file)
        self._files = {}
