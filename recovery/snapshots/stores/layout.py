"""Where stores lie: DIRECTORY/JOB/RUN/rank-R.store; rank-R.G.store after a snapshot outgrew the one before.

Beside them rank-R.OFFSET.log, stored logs (stored_log.py).

A run is one start of all workers of a job: the numbers of snapshots begin anew in each.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

_STORE = re.compile(r"rank-(?P<rank>[0-9]{1,9})(\.(?P<growth>[0-9]{1,9}))?\.store")
RUN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")


def is_name(text: object) -> bool:
    """Whether a job or run may be called so: one component of a path, and no way out of it."""
    return isinstance(text, str) and RUN_NAME.fullmatch(text) is not None and text.strip(".") != ""


@dataclass(frozen=True, order=True)
class StoreFile:
    """`growth` 0 is the first store of a rank in a run."""

    rank: int
    growth: int
    path: Path


@contextmanager
def in_use(run: Path) -> Iterator[None]:
    """Nobody removes the run's directory within the block (see `removable`).  Raises OSError."""
    descriptor = os.open(run, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # a file system without locks: then nobody can have the other kind either
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def removable(run: Path) -> Iterator[bool]:
    """Whether nobody reads or writes it, now and until the end of the block."""
    try:
        descriptor = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        free = False
    else:
        free = True
    try:
        yield free
    finally:
        os.close(descriptor)


def store_path(run: Path, rank: int, growth: int) -> Path:
    """The path of a rank's store."""
    return run / (f"rank-{rank}.{growth}.store" if growth else f"rank-{rank}.store")


ORIGIN = "origin.json"
"""Beside the stores of a run that a replay made: what they were made of."""
_LOG = re.compile(r"rank-(?P<rank>[0-9]{1,9})\.(?P<begin>[0-9]{1,20})\.log")


@dataclass(frozen=True, order=True)
class LogFile:
    """`begin`: the log offset of its first record."""

    rank: int
    begin: int
    path: Path = field(compare=False)


def log_path(run: Path, rank: int, begin: int) -> Path:
    """The path of a file that begins at a log offset."""
    return run / f"rank-{rank}.{begin}.log"


def logs_of(run: Path) -> list[LogFile]:
    """Stored logs in a run's directory, by rank and offset; raises OSError."""
    found = []
    for path in run.iterdir():
        if match := _LOG.fullmatch(path.name):
            found.append(LogFile(int(match["rank"]), int(match["begin"]), path))
    return sorted(found)


def stores_of(run: Path) -> list[StoreFile]:
    """What a run's directory holds, by rank, the newest of a rank last."""
    found = []
    for path in run.iterdir():
        if match := _STORE.fullmatch(path.name):
            found.append(StoreFile(int(match["rank"]), int(match["growth"] or 0), path))
    return sorted(found)


def runs_of(directory: Path) -> Iterator[Path]:
    """Directories of runs, by job and name."""
    for job in sorted(path for path in directory.iterdir() if path.is_dir()):
        yield from sorted(path for path in job.iterdir() if path.is_dir() and any(stores_of(path)))
