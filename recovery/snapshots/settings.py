"""What proxyd was asked to persist, and how."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from understudy import replay
from understudy.recovery.base.errors import BadInput
from understudy.recovery.snapshots.stores.retention import DEFAULT, Retention

IMAGE_LEASES = 2
"""Of those that a log has: CPU images need one, and one more while the next ones are taken."""


def check_directory(directory: Path) -> None:
    """That --persist can be there, or be made; nothing is.  Raises BadInput."""
    there = directory
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        raise BadInput(f"--persist {directory} cannot be made: Not a directory")
    if not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        raise BadInput(f"--persist {directory} cannot be {'written' if there == directory else 'made'}")


@dataclass(frozen=True)
class Writing:
    """How a rank's part of a snapshot is written (PCcheck, section 3.4)."""

    threads: int = 2
    """[p] per snapshot; the paper finds 2 to 4 best."""
    chunk_bytes: int = 4 << 20
    """[b] the unit of writes and checksums; a multiple of 4096."""
    pool_bytes: int = 64 << 20
    """[M] of host memory for chunks under way, one at least; all snapshots of the rank share it."""


@dataclass(frozen=True)
class MirrorSettings:
    """The second tier: any fsspec URL of a directory, and how much of a job stays there (retention.py)."""

    url: str
    keeps: Retention = DEFAULT


@dataclass(frozen=True)
class PersistenceSettings:
    """Where to, how often, and how many at a time."""

    directory: Path
    every_s: float = 30.0
    """The least time between two."""
    every_steps: int = 0
    """After how many steps each one is taken, whatever the time; 0: `every_s` counts."""
    slots: int = 3
    """N + 1: snapshots under way, and the one that is complete (PCcheck, section 3.1)."""
    stays_in_memory: bool = True
    """Whether a set stays in host memory once it is durable, and the log before it goes; else the memory
    goes, and the log stays from that set on."""
    writing: Writing = Writing()
    overhead: float = 0.0
    """Share of the time; if it is not 0, how often is chosen while training, whatever is said above."""
    mirror: MirrorSettings | None = None
    keep_runs: int = 3
    """Of a job in these stores, the present one among them."""

    keeps_log: bool = False
    """Whether the log behind the newest set goes there, too."""

    def make_directory(self) -> None:
        """Raises BadInput."""
        try:  # mkdir waits for a disk that hangs, even where there is nothing to do
            if not self.directory.is_dir():
                self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as problem:
            raise BadInput(f"--persist {self.directory} cannot be made: {problem.strerror}") from problem

    @property
    def all_slots(self) -> int:
        """The slots of a store: with a second tier one more, for the set that is being copied there."""
        return self.slots + (self.mirror is not None)

    @property
    def in_flight(self) -> int:
        """N, within the leases that a log has."""
        return min(self.slots - 1, replay.SNAPSHOT_LEASES - IMAGE_LEASES)


def on_several_hosts(settings: PersistenceSettings) -> PersistenceSettings:
    """What is possible of it where ranks run on other hosts: their memory cannot be read or written here."""
    return replace(settings, mirror=None, keeps_log=False, stays_in_memory=True)


def left_out(settings: PersistenceSettings) -> list[str]:
    """Options that are of no use there."""
    wanted = {
        "--mirror": settings.mirror is not None,
        "--persist-log": settings.keeps_log,
        "--persist-only": not settings.stays_in_memory,
    }
    return [option for option, asked in wanted.items() if asked]
