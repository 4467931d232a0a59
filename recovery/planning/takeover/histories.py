"""What is known of a job once it is taken over: what was written of it, and what its new leader has seen."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from understudy.protos import control_pb2 as pb
from understudy.recovery.planning.facts import RankFacts


class HasRank(Protocol):
    """What is kept of a session that ended."""

    @property
    def rank(self) -> int:
        """Whose it was."""


End = TypeVar("End", bound=HasRank)
Drill = TypeVar("Drill")
Worker = TypeVar("Worker")
Set = TypeVar("Set")


@dataclass(frozen=True, slots=True)
class History(Generic[End, Drill]):
    """Its fields are those of Job.

    `under_way`: a recovery was, whose outcome nobody has written: whatever was decided is decided anew.
    """

    generation: int = 0
    ended: tuple[End, ...] = ()
    departed: Mapping[int, bool] = field(default_factory=dict)
    last_facts: Mapping[int, RankFacts] = field(default_factory=dict)
    recoveries: tuple[pb.Recovery, ...] = ()
    adoptions: tuple[pb.Adoption, ...] = ()
    drills: tuple[Drill, ...] = ()
    validations: int = 0
    not_replayable: str = ""
    corruption: pb.JournaledCorruption | None = None
    under_way: bool = False


@dataclass(frozen=True, slots=True)
class JobHosts(Generic[Worker, Set]):
    """The other hosts of one job, as in Span, and the newest set of snapshots on storage."""

    members: frozenset[str] = frozenset()
    awaited: frozenset[str] = frozenset()
    given_up: frozenset[Worker] = frozenset()
    stored: Set | None = None
    remote_ranks: frozenset[int] = frozenset()
    astray: frozenset[int] = frozenset()
    given_up_hosts: frozenset[str] = frozenset()


def merged(
    written: History[End, Drill], here: History[End, Drill], present: Collection[int],
    newest_generation: int = 0, cut_short: bool = False,
) -> History[End, Drill]:  # fmt: skip
    """`here`: what has been seen on the host that takes it over; nothing, if a proxyd was started anew there.

    `present`: ranks that run.  `newest_generation`: that any device server has seen; `cut_short`: any rank
    stands as a recovery has left it.  Only a leader makes incidents, so what was written has them all; ranks
    that ended may have done so after it was written, or on another host.
    """
    ended = {one.rank for one in written.ended}
    departed = {
        rank: clean for rank, clean in {**here.departed, **written.departed}.items() if rank not in present
    }
    last_facts = {**here.last_facts, **written.last_facts}
    return History(
        generation=max(written.generation, here.generation, newest_generation),
        ended=(*written.ended, *(one for one in here.ended if one.rank not in ended)),
        departed=departed,
        last_facts={rank: facts for rank, facts in last_facts.items() if rank in departed},
        recoveries=written.recoveries, adoptions=written.adoptions, drills=written.drills,
        validations=written.validations, not_replayable=written.not_replayable or here.not_replayable,
        corruption=written.corruption, under_way=written.under_way or cut_short,
    )  # fmt: skip


def merged_hosts(
    written: JobHosts[Worker, Set], here: JobHosts[Worker, Set], gone: Collection[str]
) -> JobHosts[Worker, Set]:
    """`gone`: who leads it now, and led it before: neither is another host that takes part."""
    members = written.members.difference(gone)
    return JobHosts(
        members,
        written.awaited & members,
        written.given_up | here.given_up,
        here.stored or written.stored,
        written.remote_ranks,
        written.astray,
        written.given_up_hosts.difference(gone),
    )
