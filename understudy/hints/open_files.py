"""Files that are open at a hint: opened anew by path, at their position, with what came later cut off.

A file that is written from its beginning to its end (modes w, x, a) so has, after a resumption, the bytes of
a run that never stopped. In the middle of other files nothing can be undone: modes with + are refused.
"""

from __future__ import annotations

import io
import os
import pickle
import stat
from dataclasses import dataclass
from typing import Any

KINDS = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)


@dataclass(frozen=True)
class OpenFile:
    """All that is needed to open it once more; `mode` is None for one that is closed."""

    path: str
    mode: str | None = None
    position: int = 0
    size: int = 0
    """Bytes that it had when the checkpoint was taken."""
    buffering: int = -1
    encoding: str | None = None
    errors: str | None = None


def of(file: Any) -> OpenFile:
    """Its data are durable afterwards. Raises PicklingError, saying why, for what cannot be opened anew."""
    if file.closed:
        return OpenFile(os.devnull)
    name, mode = getattr(file, "name", None), getattr(file, "mode", "?")
    if not isinstance(name, str | bytes | os.PathLike):
        raise pickle.PicklingError("a file was not opened by its path")
    path = os.path.abspath(os.fsdecode(name))
    facts = os.fstat(file.fileno())
    if not stat.S_ISREG(facts.st_mode):
        raise pickle.PicklingError(f"{path} is no regular file")
    if not os.path.exists(path) or not os.path.samestat(facts, os.stat(path)):
        raise pickle.PicklingError(f"{path} is no longer the file that was opened")
    if "+" in mode:
        raise pickle.PicklingError(f"{path} is open in mode {mode}, in which nothing can be undone")
    text = isinstance(file, io.TextIOWrapper)
    if text and "\r" in "".join(file.newlines or ()):
        raise pickle.PicklingError(f"{path} has ends of lines with a carriage return; open it in binary mode")
    try:
        position = _position(file, mode)
    except OSError as error:
        raise pickle.PicklingError(f"{path} does not tell its position ({error})") from None
    size = os.fstat(file.fileno()).st_size
    if "r" not in mode and _bytes_before(file) != size:
        raise pickle.PicklingError(f"{path} is written in its middle, where nothing can be undone")
    if not text:
        return OpenFile(path, mode, position, size, 0 if isinstance(file, io.FileIO) else -1)
    return OpenFile(path, mode, position, size, 1 if file.line_buffering else -1, file.encoding, file.errors)


def reopened(found: OpenFile) -> Any:
    """Raises FileNotFoundError or ValueError where the file is no longer what it was."""
    if found.mode is None:
        file: Any = open(found.path, "rb")  # noqa: SIM115 - the function that goes on closes it
        file.close()
        return file
    if (size := os.path.getsize(found.path)) < found.size:
        raise ValueError(f"{found.path} has {size} bytes, and had {found.size} when the checkpoint was taken")
    mode = found.mode if "b" in found.mode or found.encoding else found.mode + "b"
    file = open(  # noqa: SIM115
        found.path, mode, found.buffering, found.encoding, found.errors, opener=_as_it_is
    )
    if "r" not in mode:
        os.truncate(file.fileno(), found.size)
    file.seek(found.position)
    return file


def _position(file: Any, mode: str) -> int:
    if "r" not in mode:
        file.flush()
        os.fsync(file.fileno())
    return int(file.tell())


def _bytes_before(file: Any) -> int:
    return int((file.buffer if isinstance(file, io.TextIOWrapper) else file).tell())


def _as_it_is(path: str, flags: int) -> int:
    return os.open(path, flags & ~(os.O_TRUNC | os.O_CREAT | os.O_EXCL), 0o600)
