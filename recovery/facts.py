"""What the coordinator knows when something broke: the planner's whole input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Phase(Enum):
    """Which part of a minibatch a device server executes."""

    FORWARD_BACKWARD = "FORWARD_BACKWARD"
    OPTIMIZER = "OPTIMIZER"


class FaultKind(Enum):
    """What was noticed."""

    SERVER_DIED = "server-died"
    COLLECTIVE_FAILED = "collective-failed"


Uid = tuple[int, int]
"""Names a communicator, equally on all its ranks: (uid_low, uid_high)."""


@dataclass(frozen=True)
class CommitFacts:
    """One commit of a rank.  `communicators`: (uid_low, uid_high, collectives done so far)."""

    number: int
    step: int
    complete: bool = True
    has_manifest: bool = True
    communicators: tuple[tuple[int, int, int], ...] = ()


BEGINNING = CommitFacts(number=0, step=0)
"""The empty state before a log's first record."""


@dataclass(frozen=True)
class BufferFacts:
    """A buffer alive at a commit.  `digest` is of its content; None where none was taken."""

    handle: int
    bytes: int
    digest: int | None
    shadowed: bool


Manifest = tuple[BufferFacts, ...]


@dataclass(frozen=True)
class RankFacts:
    """One rank: `alive` is its device server's; `commits`: all that are still known, oldest first.

    `manifests` maps a commit's number to the buffers alive at it, and may load them on demand.
    `floor_commit`: below it neither pre-images nor log are kept.
    """

    rank: int
    generation: int = 0
    alive: bool = True
    commits: tuple[CommitFacts, ...] = ()
    log_complete_from_start: bool = True
    manifests: Mapping[int, Manifest] = field(default_factory=dict)
    floor_commit: int = 0
    phase: Phase = Phase.FORWARD_BACKWARD
    optimizer_preimages: bool = True

    @property
    def newest(self) -> CommitFacts:
        """The last commit, or the beginning."""
        return self.commits[-1] if self.commits else BEGINNING


@dataclass(frozen=True)
class FaultFacts:
    """The fault that started a recovery; `attempts`: how often that record has failed by now."""

    kind: FaultKind
    ranks: tuple[int, ...]
    phase: Phase = Phase.FORWARD_BACKWARD
    attempts: int = 1
    message: str = ""


@dataclass(frozen=True)
class Facts:
    """All of a job.  `departed` ranks had a session that is over: nobody can run their collectives again."""

    ranks: tuple[RankFacts, ...]
    fault: FaultFacts
    departed: tuple[int, ...] = ()
