"""Files and folders while they are being made: hidden, locked, and gone if nothing comes of them.

A hidden name has the rank in it. What its maker's death leaves behind is known by its lock, which is free
then, and is removed when the same rank comes again. On a network file system the lock of a folder is seen on
its own host alone: a rank that was replaced while it still saved on another host may find its half-made save
removed, and is told so; no save that counts is touched by this.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from understudy.durable import sync_folder

from .reading import HIDDEN

_CANNOT_LINK = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
_NO_LINKS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_TRIES = 10


def unique() -> str:
    """Sixteen digits that no other name has."""
    return secrets.token_hex(8)


class HalfMade:
    """A hidden folder. Leaving its context removes it, unless it has been renamed."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.path = path
        for _ in range(_TRIES):
            path.mkdir(0o700)
            self._number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _NO_LINKS)
            if _lock(self._number) and _is_same(path, self._number):
                return
            os.close(self._number)  # whoever removes remains was there in between
            remove(path)
        raise FileExistsError(errno.EEXIST, "somebody else removes what this rank makes", str(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            remove(self.path)
        finally:
            os.close(self._number)


class Maker:
    """Makes things in a directory for one rank."""

    def __init__(self, directory: Path, rank: int, is_own: Callable[[int], bool]) -> None:
        """`is_own`: of which ranks this one removes the remains."""
        self.directory, self.rank, self._is_own = directory, rank, is_own

    def folder(self, what: str) -> HalfMade:
        """A hidden folder, to be filled and renamed. Raises OSError."""
        return HalfMade(self._hidden(what))

    @contextmanager
    def file(self, what: str) -> Iterator[tuple[Path, int]]:
        """A hidden file and its number. It is gone behind its context unless renamed. Raises OSError."""
        path = self._hidden(what)
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NO_LINKS, 0o600)
        try:
            _lock(number)
            yield path, number
        finally:
            os.close(number)
            remove(path)

    def publish(self, path: Path, text: bytes, first: bool = False) -> None:
        """A file that is there whole and durable, or not at all. Raises OSError.

        With `first`, one that is there already stays, and nothing is said.
        """
        with self.file("record") as (temporary, number):
            write_all(number, text)
            os.fsync(number)
            if first:
                _link(temporary, path)
            else:
                os.rename(temporary, path)
        sync_folder(path.parent)

    def discard(self, path: Path) -> None:
        """Remove a folder that counts, so that it counts whole or not at all. Raises OSError."""
        hidden = self._hidden("old")
        os.rename(path, hidden)
        remove(hidden)

    def remove_remains(self) -> None:
        """Of this rank's crashes. Raises OSError where the directory cannot be listed."""
        for name in os.listdir(self.directory):
            match = HIDDEN.fullmatch(name)
            if match and self._is_own(int(match[1])):
                with contextlib.suppress(OSError):
                    _remove_if_free(self.directory / name)

    def _hidden(self, what: str) -> Path:
        return self.directory / f".{what}.rank-{self.rank}.{unique()}"


def write_all(number: int, text: bytes) -> None:
    """To an open file, however many calls it takes. Raises OSError."""
    rest = memoryview(text)
    while rest:
        rest = rest[os.write(number, rest) :]


def write_new(path: Path, text: bytes) -> None:
    """A new file, durable but for its name. Raises OSError."""
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINKS, 0o600)
    try:
        write_all(number, text)
        os.fsync(number)
    finally:
        os.close(number)


def remove(path: Path) -> None:
    """What is there, as far as that can be done: what is left is tried again with the remains."""
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _remove_if_free(path: Path) -> None:
    try:
        number = os.open(path, os.O_RDONLY | _NO_LINKS)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EACCES):  # nothing that was made here
            remove(path)
        return
    try:
        if _lock(number):
            remove(path)
    finally:
        os.close(number)


def _lock(number: int) -> bool:
    """Whether nobody else has it locked. Where there are no locks, nobody has."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _is_same(path: Path, number: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(number))
    except FileNotFoundError:
        return False


def _link(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        if not path.exists():  # a file system without links: of two that come at once the last one stays
            os.rename(temporary, path)
