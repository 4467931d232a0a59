"""How checkpoints of a call lie on disk, and which of them are opened.

    run/train-0f3c…/             one call: the function, its arguments, the how-manieth of the process (0700)
    run/train-0f3c…/00000012     the 12th checkpoint of it (0600), published whole or not at all

A file is a line of JSON (what it is, and how large its parts are), a pickle, the memory of its tensors, and
the BLAKE2b digest of all that. **A pickle executes what it says**, so only regular files are opened that
belong to the user, in folders of the user's that nobody else may write.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import threading
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from understudy.durable import json_object, make_folder, sync_folder

from .source import HintError

_log = logging.getLogger("understudy.hints")
_NAME = re.compile(r"[0-9]{8}")
_DIGEST = 32
_MOST_HEAD = 1 << 16
_CHUNK = 1 << 20
FORMAT = 1
_held: set[tuple[int, Path]] = set()
"""By this process: its own locks do not exclude itself."""
_guard = threading.Lock()


@dataclass(frozen=True)
class Stored:
    """What a file holds: its head's fields, the pickle, and the memory of its tensors."""

    path: Path
    sequence: int
    head: Mapping[str, Any]
    pickle: bytes
    storages: list[torch.UntypedStorage]


class Folder:
    """The checkpoints of one call, for one process at a time."""

    def __init__(self, path: Path) -> None:
        """Make it, and take it. Raises HintError where it is not the user's alone, or in use."""
        self.path = path
        self._lock: int | None = None
        try:
            for each in (path.parent, path):
                make_folder(each)
                facts = os.lstat(each) if each == path else os.stat(each)
                _check_owner(each, facts, stat.S_ISDIR, "folder")
            if not _held_here(path):  # to open and close the lock would release the other's
                raise HintError(f"This process already runs a call with its checkpoints in {path}.")
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._lock = os.open(path / "lock", flags, 0o600)
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            locked = self._lock is not None
            self.release()
            if locked and error.errno in (errno.EACCES, errno.EAGAIN):
                raise HintError(
                    f"Another process runs the same call, with its checkpoints in {path}; give each "
                    "process a directory of its own."
                ) from None
            raise HintError(f"Checkpoints cannot be kept in {path}: {error}.") from error
        self._damaged: set[int] = set()

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        with _guard:
            _held.discard((os.getpid(), self.path))

    def remove(self) -> None:
        """The call has returned: nothing is to be gone on with."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def sequences(self) -> list[int]:
        """Of all checkpoints, newest first."""
        return sorted((int(name) for name in os.listdir(self.path) if _NAME.fullmatch(name)), reverse=True)

    def newest(self) -> Iterator[Stored]:
        """The checkpoints that are whole, newest first; what is damaged is said and passed over."""
        for sequence in self.sequences():
            path = self.path / f"{sequence:08d}"
            try:
                yield _read(path, sequence)
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                self._damaged.add(sequence)
                _log.warning("The checkpoint %s is passed over for the one before it: %s.", path, error)

    def write(
        self,
        sequence: int,
        head: Mapping[str, Any],
        pickled: bytes,
        storages: Any,
        keep: int,
        passing: Container[int] = (),
    ) -> int:
        """Publish a checkpoint; then the older ones go, but for `keep`. Returns its bytes. Raises OSError.

        Those that are `passing` do not count, and make none of the others go.
        """
        path = self.path / f"{sequence:08d}"
        temporary = self.path / f".{path.name}.new"
        sizes = {"pickle": len(pickled), "storages": [each.nbytes() for each in storages]}
        try:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
            with open(temporary, "xb", opener=_private) as file:
                through = _Hashing(file)
                through.write(json.dumps({**head, **sizes, "format": FORMAT}).encode() + b"\n")
                through.write(pickled)
                for storage in storages:
                    here = storage if storage.device.type == "cpu" else storage.cpu()
                    through.write(memory(here))
                file.write(through.hash.digest())
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, path)
            sync_folder(self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        whole = [each for each in self.sequences() if each not in self._damaged]
        kept = [each for each in whole if each in passing][:keep]
        kept += [each for each in whole if each not in passing][:keep]
        self.drop(set(self.sequences()) - set(kept))
        return through.size

    def drop(self, sequences: Iterable[int]) -> None:
        for each in sequences:
            with contextlib.suppress(OSError):
                (self.path / f"{each:08d}").unlink()


def _held_here(path: Path) -> bool:
    """Take it for this process; False where a thread of it has it."""
    with _guard:
        new = (os.getpid(), path) not in _held
        _held.add((os.getpid(), path))
        return new


def memory(storage: torch.UntypedStorage) -> memoryview:
    """A storage's bytes themselves, as long as the storage lives."""
    size = storage.nbytes()
    kind = ctypes.c_ubyte * size
    return memoryview(kind.from_address(storage.data_ptr()) if size else b"").cast("B")


def _read(path: Path, sequence: int) -> Stored:
    """Raises ValueError for what is damaged, HintError for what must not be opened."""
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(number, "rb") as file:
        facts = os.fstat(number)
        _check_owner(path, facts, stat.S_ISREG, "regular file")
        head = _head(file)
        sizes = head["storages"]
        rest = facts.st_size - file.tell() - _DIGEST
        if rest != head["pickle"] + sum(sizes):
            raise ValueError(f"it has {facts.st_size} bytes, and not as many as it says")
        _check_digest(file, facts.st_size - _DIGEST)
        file.seek(0)
        file.readline(_MOST_HEAD)
        pickled = file.read(head["pickle"])
        storages = []
        for size in sizes:
            storage = torch.UntypedStorage(size)
            if size and file.readinto(memory(storage)) != size:
                raise ValueError("it ends too early")
            storages.append(storage)
    return Stored(path, sequence, head, pickled, storages)


def _head(file: IO[bytes]) -> dict[str, Any]:
    line = file.readline(_MOST_HEAD)
    head = json_object(line)
    if head.get("format") != FORMAT:
        raise ValueError("it is no checkpoint of this format")
    for name, kind in (("pickle", int), ("storages", list), ("source", str), ("python", str), ("hint", int)):
        if type(head.get(name)) is not kind:
            raise ValueError(f"its field {name!r} is {str(head.get(name))[:40]}")
    if head["pickle"] < 0 or not all(type(size) is int and size >= 0 for size in head["storages"]):
        raise ValueError("its sizes are none")
    return head


def _check_digest(file: IO[bytes], size: int) -> None:
    found = hashlib.blake2b(digest_size=_DIGEST)
    file.seek(0)
    while size and (piece := file.read(min(size, _CHUNK))):
        found.update(piece)
        size -= len(piece)
    if found.digest() != file.read(_DIGEST):
        raise ValueError("its digest is not the one that was written down")


def _check_owner(path: Path, facts: os.stat_result, is_kind: Any, kind: str) -> None:
    if not is_kind(facts.st_mode):
        raise HintError(f"{path} is no {kind}; checkpoints are pickles and are not read from it.")
    if facts.st_uid != os.geteuid():
        raise HintError(
            f"{path} belongs to user {facts.st_uid}; checkpoints are pickles, which execute what they say, "
            "so only one's own are used."
        )
    if facts.st_mode & 0o022:
        raise HintError(
            f"Others may write {path}; checkpoints are pickles, which execute what they say, so take that "
            f"right away (chmod go-w {path})."
        )


def _private(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NOFOLLOW, 0o600)


class _Hashing:
    """A file that knows size and digest of what went through it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.size = file, 0
        self.hash = hashlib.blake2b(digest_size=_DIGEST)

    def write(self, data: bytes | memoryview) -> None:
        self.hash.update(data)
        self.file.write(data)
        self.size += len(data)
