"""Each rank's generators of random numbers, at the end of each step, where they outlive the process.

A replica's checkpoint has the state that replicas share; the generators of a rank that was killed are in
none. So each rank keeps its own in a memory-mapped file, `DIR/slots/rank-<R>/<ordinal>-<attempt>`: what a
process wrote there is the kernel's, and stays when the process is killed (not when its host loses power).

A file has `SLOTS` places that are written in turn, each with step, length and digest: one that was cut short
is seen, and the steps before it are whole. An attempt has a file of its own, because nothing may be written
over before it is known with which step the job goes on. Nothing in a file is executed; it is read as
untrusted.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import stat
import struct
from pathlib import Path

from .generators import Generators

SLOTS = 4
"""Steps that a file keeps: the one in progress, the last completed one, and two before it."""
_SLOT = 16384
_MAGIC = b"usdyjit2"
_HEAD = struct.Struct("<8sQI8s")
"""Of a slot: magic, step, length of what follows, digest of step and what follows."""
_ATTEMPTS = 10_000
"""More files than that of one rank are no longer looked through."""
_NAME = re.compile(r"([0-9]{4,12})-.{0,250}")


class SlotFile:
    """Where this rank writes, in this attempt."""

    def __init__(self, folder: Path, attempt: str) -> None:
        """`folder`: of this rank. Raises OSError where the file cannot be made, a full disk included."""
        folder.mkdir(0o700, parents=True, exist_ok=True)
        self.path = _next_path(folder, attempt)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        number = os.open(self.path, flags, 0o600)
        try:
            os.posix_fallocate(number, 0, SLOTS * _SLOT)  # a write into a hole of a full disk would be SIGBUS
            self._map = mmap.mmap(number, SLOTS * _SLOT)
        except BaseException:
            self.path.unlink(missing_ok=True)
            raise
        finally:
            os.close(number)
        self._last: tuple[int, Generators] | None = None

    def write(self, step: int, generators: Generators) -> None:
        """Those that a process has that has completed `step`; those written before for this step are void."""
        if self._last == (step, generators) or self._map.closed:
            return
        packed = generators.packed
        if _HEAD.size + len(packed) > _SLOT:
            raise ValueError(f"The generators' states take {len(packed)} bytes, more than a slot has.")
        at = step % SLOTS * _SLOT
        self._map[at : at + _HEAD.size] = bytes(_HEAD.size)
        self._map[at + _HEAD.size : at + _HEAD.size + len(packed)] = packed
        self._map[at : at + _HEAD.size] = _HEAD.pack(_MAGIC, step, len(packed), _digest(step, packed))
        self._last = (step, generators)

    def close(self) -> None:
        self._map.close()


def find(folder: Path, step: int) -> Generators | None:
    """Those of a rank that had completed `step`, from its newest attempt that has them."""
    for path in reversed(_files(folder)):
        if (found := _read(path, step)) is not None:
            return found
    return None


def _read(path: Path, step: int) -> Generators | None:
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        info = os.fstat(number)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
            return None
        slot = os.pread(number, _SLOT, step % SLOTS * _SLOT)
    except OSError:
        return None
    finally:
        os.close(number)
    if len(slot) < _HEAD.size:
        return None
    magic, found, length, digest = _HEAD.unpack_from(slot)
    packed = slot[_HEAD.size : _HEAD.size + length]
    if (magic, found, length) != (_MAGIC, step, len(packed)) or digest != _digest(step, packed):
        return None
    try:
        return Generators.of(packed)
    except ValueError:
        return None


def remove_old(folder: Path, keep: int) -> None:
    """All files but the newest `keep`."""
    for path in _files(folder)[:-keep]:
        path.unlink(missing_ok=True)


def _files(folder: Path) -> list[Path]:
    """Of all attempts, oldest first, by their ordinals: clocks are not compared."""
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if match := _NAME.fullmatch(entry.name):
                    found.append((int(match[1]), entry.name))
                if len(found) == _ATTEMPTS:
                    break
    except OSError:
        return []
    return [folder / name for _, name in sorted(found)]


def _next_path(folder: Path, attempt: str) -> Path:
    files = _files(folder)
    ordinal = int(files[-1].name.split("-")[0]) + 1 if files else 0
    return folder / f"{ordinal:04d}-{re.sub('[^A-Za-z0-9_.-]', '_', attempt)[:200]}"


def _digest(step: int, packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=8, salt=struct.pack("<Q", step)).digest()
