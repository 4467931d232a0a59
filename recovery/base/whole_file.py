"""Small files that are there whole, or are not there: what processes of ours leave to each other."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def write_whole(path: Path, content: bytes, *, synced: bool = False) -> None:
    """Replaces the file, for its owner alone: whoever reads it finds the old content or the new one.

    `synced`: the content is on the disk before it has the name.  Raises OSError.
    """
    new = path.with_name(f"{path.name}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(new, flags, 0o600), "wb") as file:
        file.write(content)
        if synced:
            file.flush()
            os.fsync(file.fileno())
    new.rename(path)


def read_whole(path: Path, largest: int) -> bytes:
    """What was written so.  Raises OSError; so it does if it is no plain file of ours, or has more bytes."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
            raise OSError("it is no regular file of ours")
        content = file.read(largest + 1)
    if len(content) > largest:
        raise OSError(f"it has more than {largest} bytes")
    return content
