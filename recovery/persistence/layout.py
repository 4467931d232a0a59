"""Where stores lie: DIRECTORY/JOB/RUN/rank-R.store; rank-R.G.store after a snapshot outgrew the one before.

A run is one start of all workers of a job: the numbers of snapshots begin anew in each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_STORE = re.compile(r"rank-(?P<rank>[0-9]{1,9})(\.(?P<growth>[0-9]{1,9}))?\.store")
RUN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")


@dataclass(frozen=True, order=True)
class StoreFile:
    """`growth` 0 is the first store of a rank in a run."""

    rank: int
    growth: int
    path: Path


def store_path(run: Path, rank: int, growth: int) -> Path:
    """Of a rank's store."""
    return run / (f"rank-{rank}.{growth}.store" if growth else f"rank-{rank}.store")


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
