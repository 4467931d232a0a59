"""The second tier: a directory at any fsspec URL, and what lies where in it (docs/snapshot-format.md).

    URL/JOB/RUN/SERIAL/rank-R-TAG.part    payload of a rank, under a name of its own for each try
    URL/JOB/RUN/SERIAL/manifest.json      written last: without it the set does not count

Credentials come from the environment, as each file system of fsspec has it; none is ever part of a URL.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec.implementations.local import LocalFileSystem

from understudy.recovery.base.errors import BadInput
from understudy.recovery.snapshots.stores.layout import is_name

MANIFEST = "manifest.json"
PART = re.compile(r"rank-[0-9]{1,9}-[0-9a-f]{16}\.part")
_HALF_MADE = re.compile(r"manifest\.json-[0-9a-f]{16}\.new")
_SERIAL = re.compile(r"[1-9][0-9]{0,18}")
BLOCK_BYTES = 32 << 20
"""Of an upload in pieces, at least; it is held in memory."""
MOST_BLOCKS = 9000
"""S3 takes 10,000."""


@dataclass(frozen=True)
class SetName:
    """The name of a set, in the mirror as in the local stores."""

    job: str
    run: str
    serial: int


@dataclass(frozen=True)
class RemoteFile:
    """One of ours, by its name."""

    of: SetName
    name: str
    bytes: int


class Remote:
    """A directory at a URL.  Every call may raise OSError, whatever its file system's library raises."""

    def __init__(self, url: str) -> None:
        """Raises BadInput."""
        self.url = url.rstrip("/")
        check_url(url)
        self._files = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)[0]
        self._root = str(self._files._strip_protocol(self.url)).rstrip("/")

    @property
    def is_local(self) -> bool:
        """Whether it is a directory of this system, mounted from wherever."""
        return isinstance(self._files, LocalFileSystem)

    def greet(self) -> None:
        """Raises OSError if it does not answer, or has no such bucket or directory."""
        of_buckets = not self.is_local and "://" not in self._root
        top = self._root.partition("/")[0] if of_buckets else self._root
        with _as_os_error():
            if not self._files.exists(top):
                raise FileNotFoundError(f"there is no {top}")

    def files(self, job: str = "") -> list[RemoteFile]:
        """What bears our names, of one job or of all.  Raises FileNotFoundError if there is no such place."""
        top = f"{self._root}/{job}" if job else self._root
        with _as_os_error():
            found = self._files.find(top, detail=True)
            if not found and not job and not self._files.exists(self._root):
                raise FileNotFoundError(f"there is nothing at {self.url}")
        names = ((path, found[path]) for path in sorted(found) if path.startswith(self._root + "/"))
        parsed = (_parsed(path[len(self._root) + 1 :], info) for path, info in names)
        return [one for one in parsed if one is not None]

    def write(self, of: SetName, name: str, pieces: Iterable[bytes], count: int) -> None:
        """A file of `count` bytes, durable when this returns; what fails may leave a part of it."""
        path = self._path(of, name)
        with _as_os_error(), self._created(path, count) as file:
            for piece in pieces:
                file.write(piece)
            if self.is_local:
                file.flush()
                os.fsync(file.fileno())
        if self.is_local:
            _sync_folders(Path(path), Path(self._root))

    def write_manifest(self, of: SetName, content: bytes) -> None:
        """All of it or nothing: under another name first."""
        half_made = f"{MANIFEST}-{tag()}.new"
        self.write(of, half_made, [content], len(content))
        with _as_os_error():
            self._files.mv(self._path(of, half_made), self._path(of, MANIFEST))
        if self.is_local:
            _sync_folders(Path(self._path(of, MANIFEST)), Path(self._root))

    def read(self, of: SetName, name: str, begin: int, end: int) -> bytes:
        """These bytes of a file, fewer where it ends."""
        with _as_os_error():
            return bytes(self._files.cat_file(self._path(of, name), start=begin, end=end))

    def remove(self, of: SetName, names: Iterable[str]) -> None:
        """Files of a set, in their order; then its directories, if it has such and they are empty."""
        for name in names:
            with contextlib.suppress(FileNotFoundError), _as_os_error():
                self._files.rm_file(self._path(of, name))
        if self.is_local:
            folder = Path(self._path(of, ""))
            with contextlib.suppress(OSError):  # somebody else's files are in it
                folder.rmdir()
                folder.parent.rmdir()

    def _path(self, of: SetName, name: str) -> str:
        return f"{self._root}/{of.job}/{of.run}/{of.serial}/{name}"

    def _created(self, path: str, count: int) -> Any:
        options = {"block_size": max(BLOCK_BYTES, -(-count // MOST_BLOCKS))}
        try:
            return self._files.open(path, "wb", **options)
        except FileNotFoundError:  # a file system with directories
            if not self._files.isdir(self._root):  # perhaps it is not mounted: never make one in its place
                raise FileNotFoundError(f"there is no directory {self._root}") from None
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            return self._files.open(path, "wb", **options)


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """Libraries of object stores have exceptions of their own, for a server that is not there, say."""
    try:
        yield
    except (OSError, ValueError):
        raise
    except Exception as problem:
        raise OSError(str(problem) or repr(problem)) from problem


def check_url(url: str) -> None:
    """Raises BadInput, in a sentence that never repeats a password."""
    parts = urlsplit(url)
    if "::" in url or not parts.scheme or not (parts.netloc + parts.path).strip("/"):
        raise BadInput(
            f"{_without_user(url)!r} is no URL of a directory: write for example s3://bucket/prefix"
        )
    if "@" in parts.netloc:
        raise BadInput(
            f"{_without_user(url)!r} came with a user or password: give those by the environment, "
            "where other users do not see them"
        )
    if parts.scheme == "memory":
        raise BadInput(f"{url!r} is memory of one process, and would end with it")
    try:
        fsspec.get_filesystem_class(parts.scheme)
    except (ValueError, ImportError) as problem:
        raise BadInput(f"{url!r} cannot be used: {problem}") from problem


def is_url(text: str) -> bool:
    """Whether it names a place by a URL, and not a path."""
    return "://" in text


def tag() -> str:
    """Makes a name that no earlier try had: what a killed one still writes harms nobody."""
    return secrets.token_hex(8)


def part_name(rank: int) -> str:
    """New each time."""
    return f"rank-{rank}-{tag()}.part"


def _without_user(url: str) -> str:
    return re.sub(r"//[^/]*@", "//", url)


def _parsed(path: str, info: dict[str, Any]) -> RemoteFile | None:
    parts = path.split("/")
    if len(parts) != 4 or not is_name(parts[0]) or not is_name(parts[1]) or not _SERIAL.fullmatch(parts[2]):
        return None
    if not (parts[3] == MANIFEST or PART.fullmatch(parts[3]) or _HALF_MADE.fullmatch(parts[3])):
        return None
    return RemoteFile(SetName(parts[0], parts[1], int(parts[2])), parts[3], int(info.get("size") or 0))


def _sync_folders(file: Path, root: Path) -> None:
    """Make its name durable, and those of the directories between."""
    for folder in file.parents:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if folder == root:
            return
