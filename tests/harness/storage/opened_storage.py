"""Storages, memory for them, and what they must say, for tests of the storage engines."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from understudy.recovery.snapshots._storage import Storage

MIB = 1 << 20
SIZE = 8 * MIB
DIRECT = ["uring", "direct"]
CACHED = ["buffered", "mmap", "dax"]
ENGINES = DIRECT + CACHED


def aligned(count: int, seed: int = 0) -> mmap.mmap:
    """Memory that begins a page: zeros, or bytes of a seed."""
    memory = mmap.mmap(-1, count)
    if seed:
        memory[:] = random.Random(seed).randbytes(count)
    return memory


def opened(path: str | Path, engine: str, writable: bool = True) -> Storage:
    """As asked for; skips the test where the machine has no such engine at all."""
    try:
        return Storage(str(path), engine, writable)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM, errno.ENOTSUP):
            pytest.skip(f"no {engine} here: {error}")
        raise


@contextlib.contextmanager
def refused(number: int | tuple[int, ...], *words: str) -> Iterator[None]:
    """What is within must raise an OSError with (one of) the number(s), whose message contains the words."""
    with pytest.raises(OSError) as raised:
        yield
    numbers = number if isinstance(number, tuple) else (number,)
    assert raised.value.errno in numbers, raised.value
    for word in words:
        assert word in str(raised.value)


def descriptors_of(path: str) -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"/proc/self/fd/{name}") == path:
                found.append(name)
    return found


def mappings_of(path: str) -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if path in line or "io_uring" in line]
