"""Digests of payloads: of single files, and of whole folders of them.

The digest is XXH3-64, `xxh3-64`: a file is read with it in an eighth of the time that the fastest one in
Python's standard library takes, and a save must be done within the grace of a SIGTERM. Our C++ part computes
it. A checkout has none: it writes BLAKE2b of 64 bits, `blake2b-64`, as older versions did, and cannot verify
the other. The name is part of the metadata.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from .identity import JitError

try:
    from . import _digest
except ImportError:  # a checkout that was not built
    _digest = None  # type: ignore[assignment]

XXH3, BLAKE2B = "xxh3-64", "blake2b-64"
ALGORITHMS = (XXH3, BLAKE2B)
ALGORITHM = BLAKE2B if _digest is None else XXH3
"""Of what is written."""
DEEPEST = 64
"""Folders below each other in a payload."""
MOST_FILES = 10_000
_BYTES = 8
_PIECE = 1 << 20
_NO_LINKS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class Unfit(ValueError):
    """A file or a folder cannot be a payload, or is not the one that was saved."""


@dataclass(frozen=True)
class FileDigest:
    """Of one file of a payload: its size in bytes, and its digest in hexadecimal digits."""

    size: int
    digest: str
    algorithm: str = ALGORITHM


def of_bytes(data: bytes) -> str:
    """Of what is short and in memory, names and metadata: always BLAKE2b."""
    return hashlib.blake2b(data, digest_size=_BYTES).hexdigest()


def of_file(number: int, algorithm: str = ALGORITHM) -> FileDigest:
    """Of an open file, from its beginning to its end. Raises OSError.

    JitError in a checkout (above): a job is not to begin anew because of what lies in order.
    """
    if algorithm == XXH3:
        if _digest is None:
            raise JitError(
                f"Checkpoints here have {XXH3} digests, which only an installed version computes, and this "
                "one lies in a checkout; start from another folder, or with python -P."
            )
        return FileDigest(*_digest.of_file(number), algorithm)
    found, size = hashlib.blake2b(digest_size=_BYTES), 0
    piece = memoryview(bytearray(_PIECE))
    while count := os.preadv(number, [piece], size):
        found.update(piece[:count])
        size += count
    return FileDigest(size, found.hexdigest(), algorithm)


def of_payload(files: Mapping[str, FileDigest]) -> str:
    """Of all files of a payload, and their names: equal for replicas with equal payloads."""
    lines = (f"{file.size} {file.digest} {name}" for name, file in sorted(files.items()))
    return of_bytes("\0".join(lines).encode(errors="surrogatepass"))


def make_durable(folder: int, name: str) -> dict[str, FileDigest]:
    """Sync a file, or a folder with all that is in it; answers the digest of each file by its relative name.

    `folder`: number of the open folder that has `name`. Raises Unfit for links, devices and the like, which
    would not be read back, and OSError.
    """
    found: dict[str, FileDigest] = {}
    _sync(folder, name, name, found)
    return found


def _sync(folder: int, name: str, path: str, found: dict[str, FileDigest]) -> None:
    if path.count("/") > DEEPEST:
        raise Unfit(f"its folders lie more than {DEEPEST} deep")
    with opened(folder, name, path) as (number, status):
        if stat.S_ISDIR(status.st_mode):
            for entry in sorted(os.listdir(number)):
                _sync(number, entry, f"{path}/{entry}", found)
        elif len(found) == MOST_FILES:
            raise Unfit(f"it has more than {MOST_FILES} files")
        else:
            found[path] = of_file(number)
        os.fsync(number)


@contextmanager
def opened(folder: int, name: str, path: str) -> Iterator[tuple[int, os.stat_result]]:
    """A regular file or a folder, by its name in an open folder. Raises Unfit for anything else, and OSError.

    `path`: what it is called in messages.
    """
    if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        raise Unfit(f"{path} is a symbolic link, and none is followed")
    number = os.open(name, _NO_LINKS, dir_fd=folder)
    try:
        status = os.fstat(number)
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise Unfit(f"{path} is neither a file nor a folder")
        yield number, status
    finally:
        os.close(number)


@contextmanager
def opened_below(folder: int, path: str) -> Iterator[tuple[int, os.stat_result]]:
    """As `opened`, for a name with folders in it; no part of it may be a link."""
    first, _, rest = path.partition("/")
    with opened(folder, first, path) as (number, status):
        if not rest:
            yield number, status
        elif not stat.S_ISDIR(status.st_mode):
            raise Unfit(f"{path} lies below a file")
        else:
            with opened_below(number, rest) as found:
                yield found
