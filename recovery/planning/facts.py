"""What the coordinator knows when something broke: the planner's whole input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Phase(Enum):
    """Which part of a minibatch a device server executes."""

    FORWARD_BACKWARD = "FORWARD_BACKWARD"
    OPTIMIZER = "OPTIMIZER"


class FaultKind(Enum):
    """What was noticed."""

    SERVER_DIED = "server-died"
    SERVER_STOPPED = "server-stopped"
    SERVER_HUNG = "server-hung"
    DEVICE_GONE = "device-gone"
    COLLECTIVE_FAILED = "collective-failed"
    COLLECTIVE_HUNG = "collective-hung"
    CALL_FAILED = "call-failed"
    DRIVER_SUSPECT = "driver-suspect"
    HOST_LOST = "host-lost"
    SILENT_CORRUPTION = "silent-corruption"
    VALIDATION = "validation"
    REHEARSAL = "rehearsal"
    """Nothing is broken: the operator wants to see a restore from storage."""
    PLANNED_MOVE = "planned-move"
    """Nothing is broken: the operator wants a rank on another device."""


ECHOES = (FaultKind.COLLECTIVE_FAILED, FaultKind.COLLECTIVE_HUNG)
"""What other ranks see of a fault, or a fault by itself."""
WISHES = (FaultKind.PLANNED_MOVE, FaultKind.REHEARSAL)
"""What somebody ordered: nothing was broken."""
SERVERS_SOUND = (FaultKind.SILENT_CORRUPTION, *WISHES)
"""Every server does as it should: nobody is to be lost for this."""


Uid = tuple[int, int]
"""Names a communicator, equally on all its ranks: (uid_low, uid_high)."""


@dataclass(frozen=True, slots=True)
class CommitFacts:
    """One commit of a rank.  `uids` names its communicators, `sequences` says how many collectives of each it
    has done so far.

    `index`: records of the log before it.  Replay may commit at other places than the run before it did, so
    that a snapshot's number may by now be that of a commit elsewhere: by `place` they are told apart, and
    what they have done grows with `index`, in whichever of a rank's lives they were made.
    `members`: how many ranks each of them has; empty if that is not known.  `optimizer`: an optimizer step
    without pre-images begins right behind it.  `call`: records of the minibatch before it; 0 at its end.
    `step_digest`: of what the optimizer step before it did, and to what; 0 if that is not known.
    """

    number: int
    step: int
    complete: bool = True
    has_manifest: bool = True
    uids: tuple[Uid, ...] = ()
    sequences: tuple[int, ...] = ()
    members: tuple[int, ...] = ()
    optimizer: bool = False
    call: int = 0
    step_digest: int = 0
    index: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """What tells it from every other commit of its rank."""
        return self.index, self.number

    @property
    def communicators(self) -> tuple[tuple[int, int, int], ...]:
        """(uid_low, uid_high, collectives done) of each, as a log has them."""
        return tuple((*uid, sequence) for uid, sequence in zip(self.uids, self.sequences, strict=True))


BEGINNING = CommitFacts(number=0, step=0)
"""The empty state before a log's first record."""


class BufferFacts(NamedTuple):
    """A buffer alive at a commit.  `digest` is of its content; None where none was taken.

    Manifests have many: of all facts these must be made and read fastest.
    """

    handle: int
    bytes: int
    digest: int | None
    shadowed: bool


Manifest = tuple[BufferFacts, ...]


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank: `alive` is its device server's; `commits`: all that are still known, oldest first.

    `manifests` maps a commit's number to the buffers alive at it, and may load them on demand.
    `floor_commit`: below it neither pre-images nor log are kept, but for the log since the oldest of
    `snapshots`: commits whose whole state lies in host memory, oldest first.  `protected`: the server keeps
    pre-images.  `suspect`: its driver is not to be trusted any more, but its memory can be read.
    `leaving`: it is to go to another device, which is kept for it; if that cannot be, it stays.
    `refused_commit`: its server could not go on from there with state of others; 0: none.  `stored`: commits
    whose whole state lies on storage, and to which the log reaches back, oldest first.  `refused_snapshots`:
    places of those commits among `snapshots` that a server found damaged.  `restores_from_image`: its host
    is gone, and its worker comes back as it was in an image that goes with its only snapshot.  `unread`:
    ranks whose state its server could not read, though it was tried again.  `begun`: communicators that it
    has made since its newest commit, and how many ranks each of them has.  `host`: where its device server
    runs; empty: on the host that plans.  `sealed`: its server runs, and stands inside an optimizer step out
    of which no way leads: nothing of its state is of any use, as if it were dead.
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
    suspect: bool = False
    leaving: bool = False
    snapshots: tuple[CommitFacts, ...] = ()
    protected: bool = True
    refused_commit: int = 0
    stored: tuple[CommitFacts, ...] = ()
    refused_snapshots: frozenset[tuple[int, int]] = frozenset()
    restores_from_image: bool = False
    unread: frozenset[int] = frozenset()
    begun: tuple[tuple[Uid, int], ...] = ()
    host: str = ""
    sealed: bool = False

    @property
    def newest(self) -> CommitFacts:
        """The last commit, or the beginning."""
        return self.commits[-1] if self.commits else BEGINNING

    @property
    def stays(self) -> bool:
        """Whether its server goes on with it."""
        return self.alive and not self.suspect and not self.leaving

    def until(self, number: int, snapshot: CommitFacts) -> bool:
        """Whether a snapshot is of that commit, or of an earlier moment."""
        known = next((commit for commit in self.commits if commit.number == number), None)
        return snapshot.number <= number if known is None else snapshot.index <= known.index

    def refuses(self, commit: CommitFacts) -> bool:
        """Whether copies of others' state did not do there, or may well not, as it is newer."""
        return 0 < self.refused_commit <= commit.number

    @property
    def communicates(self) -> bool:
        """Whether it had a communicator at any commit that is still known, or has made one since."""
        return bool(self.begun) or any(commit.uids for commit in self.commits)


@dataclass(frozen=True, slots=True)
class FaultFacts:
    """The fault that started a recovery; `attempts`: how often that record has failed by now.

    `trusted`: rank -> its newest commit whose content is known to be right; empty unless it was corrupted.
    `sound`: those of `ranks` that only an order or a validation concerns: their servers were alive then.
    """

    kind: FaultKind
    ranks: tuple[int, ...]
    phase: Phase = Phase.FORWARD_BACKWARD
    attempts: int = 1
    message: str = ""
    trusted: Mapping[int, int] = field(default_factory=dict)
    sound: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """Everybody whom the fault concerns.

    `departed`: ranks among them whose session is over, so that nobody can run their collectives again.
    `homeless` ranks need another device, as theirs has failed.
    `not_replayable`: empty, or how a validation or a recovery found that replay gives other bits.
    `storage_problem`: empty, or why a snapshot on storage turned out to be of no use.
    """

    ranks: tuple[RankFacts, ...]
    fault: FaultFacts
    departed: tuple[int, ...] = ()
    homeless: tuple[int, ...] = ()
    free_devices: int = 0
    not_replayable: str = ""
    storage_problem: str = ""
