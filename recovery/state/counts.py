"""What is kept of a job beside its sessions: of those that ended, of its drills, and of its copies."""

from __future__ import annotations

from dataclasses import dataclass

from understudy.protos import control_pb2 as pb
from understudy.recovery.drills.spec import Drill


@dataclass(frozen=True)
class Ended:
    """What is kept of a session when its log is gone."""

    rank: int
    clean: bool
    steps: int
    calls_per_step: int
    bytes_per_step: int
    replies_compared: int
    replies_different: int
    recent_calls: tuple[int, ...]
    status: pb.RankStatus
    automatic_commits: int = 0
    """Made by size, where the program did not step."""
    records: int = 0


@dataclass
class ScheduledDrill:
    """A drill ordered for a job, and its place in the log of the rank it concerns."""

    drill: Drill
    slot: int = -1
    fired: bool = False
    account: str = ""
    """What proxyd did when it fired."""


@dataclass
class CopyCounts:
    """Counts a job's sets of snapshots, on their way to storage or to the second tier."""

    copied: int = 0
    """Sets that are complete there."""
    bytes: int = 0
    """Of those; to the second tier all that was handed over."""
    skipped: int = 0
    """Sets that were due and were left out: no slot was free, or newer ones replaced them."""
    failures: int = 0


@dataclass
class LogCounts:
    """Counts what of a job's logs is on its way to storage."""

    bytes: int = 0
    gaps: int = 0
    """How often a log was let go of before it was there."""
    failures: int = 0
