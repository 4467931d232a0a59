"""Which workers of a job go on, and which have ended or were superseded, by what their hosts tell of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True, slots=True)
class WorkerId:
    """A process of one host; the host that leads is ""."""

    host: str
    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A worker whose rank runs elsewhere by now."""

    host: str
    pid: int
    start_ticks: int = 0
    """0: whichever process has that number."""

    def covers(self, other: WorkerId) -> bool:
        """Whether that worker is this one."""
        return (self.host, self.pid) == (other.host, other.pid) and self.start_ticks in (0, other.start_ticks)


@dataclass(frozen=True, slots=True)
class KnownWorker:
    """What the leader of the job knows of a rank's worker.

    `active`: its program goes on, as far as is known.  `may_be_away`: it was to go to another host, and of
    whether it did nobody has heard.
    """

    worker: WorkerId
    active: bool = True
    may_be_away: bool = False


@dataclass(frozen=True, slots=True)
class ToldWorker:
    """What a host tells of a rank's worker.  `leaving`: it is on its way to another host."""

    worker: WorkerId
    leaving: bool = False


class Fate(Enum):
    """What has become of a rank's worker."""

    GOES_ON = auto()
    """It is the one that is known."""
    BEGAN = auto()
    """It is another one; a former one there has ended."""
    ARRIVED = auto()
    """It was awaited there."""
    MOVED = auto()
    """It went there unheard, as a leader before had ordered."""
    LEAVES = auto()
    """It goes on where it is known to be; there only what it has left is told of."""
    SUPERSEDED = auto()
    """Its rank was given up there and runs elsewhere: it is to be ended."""
    AWAITED = auto()
    """It may have gone to another host, which is to tell of it."""
    ENDED = auto()
    UNKNOWN = auto()
    """Nothing is to be learned of it."""


def fate_of(
    told: ToldWorker, known: KnownWorker | None, expected_at: str = "", given_up: Iterable[GivenUp] = ()
) -> Fate:
    """`expected_at`: the host where the rank is about to arrive."""
    worker = told.worker
    if any(one.covers(worker) for one in given_up):
        return Fate.SUPERSEDED
    if expected_at and expected_at == worker.host:
        return Fate.ARRIVED
    if known is not None and known.active and known.worker.host != worker.host:
        return Fate.LEAVES if told.leaving else Fate.MOVED
    if known is not None and known.worker == worker:
        return Fate.GOES_ON
    return Fate.BEGAN


def fate_untold(known: KnownWorker) -> Fate:
    """Its host has told of all workers that it has, and not of this one."""
    return Fate.AWAITED if known.may_be_away else Fate.ENDED


def fate_of_ended(ended: WorkerId, known: KnownWorker | None, departed: bool) -> Fate:
    """What a host tells of the newest end of a rank there, of which it has none any more.

    `departed`: that the rank's worker has ended is known.  BEGAN: it has been there unheard, and has ended.
    ENDED: so has whichever worker of that host is known.
    """
    if known is None:
        return Fate.UNKNOWN if departed else Fate.BEGAN
    return Fate.ENDED if known.worker.host == ended.host else Fate.UNKNOWN


def missing(worlds: Iterable[int], known: Collection[int], departed: Collection[int]) -> list[int]:
    """Ranks of which nobody tells, once all hosts have that are not lost."""
    return sorted(set(range(max(worlds, default=0))) - {*known} - {*departed})
