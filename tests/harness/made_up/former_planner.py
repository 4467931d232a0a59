"""The planner before it was near-linear: it visits every cut, and reads each manifest for each reader.

`installed()` has plans made by it: the oracle of tests/planning/test_planner_equality.py.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from unittest import mock

from understudy.recovery.base.naming_ranks import named
from understudy.recovery.planning import planner
from understudy.recovery.planning.communicators import is_young
from understudy.recovery.planning.cuts import Cut
from understudy.recovery.planning.facts import (
    BEGINNING,
    BufferFacts,
    CommitFacts,
    Facts,
    Manifest,
    RankFacts,
    Uid,
)
from understudy.recovery.planning.planner import Plan
from understudy.recovery.planning.replicas import MOST_OTHERS, Content, Copy, needs_replica
from understudy.recovery.planning.restarts import Restart
from understudy.recovery.planning.roll_forward import roll_forward

_DESTROYED = (1 << 64) - 1
_LARGEST_SEARCH = 4096


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Plans are made by this one."""
    with (
        mock.patch.object(planner, "CutSearch", CutSearch),
        mock.patch.object(planner, "connected", connected),
        mock.patch.object(planner, "_without_snapshots", without_snapshots),
    ):
        yield


def memberships(ranks: Sequence[RankFacts]) -> dict[Uid, list[int]]:
    """Communicator -> ranks that have it, or may get it from records behind their newest commit.

    While fewer ranks than it has members are known to have it, any other rank may be the missing one.
    """
    members: dict[Uid, set[int]] = {}
    sizes: dict[Uid, int] = {}
    for rank in ranks:
        for commit in (*rank.stored, *rank.snapshots, *rank.commits):
            for index, (low, high, _) in enumerate(commit.communicators):
                members.setdefault((low, high), set()).add(rank.rank)
                sizes[low, high] = commit.members[index] if commit.members else 0
        for uid, size in rank.begun:
            members.setdefault(uid, set()).add(rank.rank)
            sizes[uid] = size
    young = {rank.rank for rank in ranks if is_young(rank)}
    everybody = {rank.rank for rank in ranks}

    def of(uid: Uid, having: set[int]) -> set[int]:
        if not sizes[uid]:  # not known
            return having | young
        return everybody if len(having) < sizes[uid] else having

    return {uid: sorted(of(uid, having)) for uid, having in sorted(members.items())}


def connected(ranks: Sequence[RankFacts], start: Sequence[int]) -> set[int]:
    """Ranks that share a communicator with one of `start`, transitively; `start` included.

    Of young ranks it is not known yet, so any two of them may.
    """
    groups = [set(members) for members in memberships(ranks).values()]
    groups.append({rank.rank for rank in ranks if is_young(rank)})
    reached = set(start)
    while True:
        more = {rank for group in groups if group & reached for rank in group} - reached
        if not more:
            return reached
        reached |= more


def forgotten(ranks: Sequence[RankFacts], choices: Mapping[int, Sequence[CommitFacts]]) -> set[Uid]:
    """What not all are known to have had, and all who are have given up at their floors and all choices.

    The planner that this one was before took those for communicators that others may be about to join.
    """
    known: dict[Uid, list[bool]] = {}
    for rank in ranks:
        floors = [commit for commit in rank.commits if commit.number == rank.floor_commit] or [BEGINNING]
        at = _sequences(rank, [*floors, *choices[rank.rank]])
        for uid in {uid for sequences in _all_sequences(rank).values() for uid in sequences}:
            known.setdefault(uid, []).append(all(one.get(uid) == _DESTROYED for one in at))
        for uid, _ in rank.begun:
            known.setdefault(uid, []).append(False)
    members = memberships(ranks)
    return {uid for uid, over in known.items() if all(over) and len(members[uid]) > len(over)}


class CutSearch:
    """Consistent cuts among `choices`, some of each rank's commits (oldest first; `BEGINNING` may be one)."""

    def __init__(
        self,
        ranks: Sequence[RankFacts],
        choices: Mapping[int, Sequence[CommitFacts]],
        communicators: object = None,
    ) -> None:
        self._choices = {rank.rank: list(choices[rank.rank]) for rank in ranks}
        over = forgotten(ranks, choices)
        members = memberships(ranks).items()
        self._members = {uid: having for uid, having in members if len(having) > 1 and uid not in over}
        self._sequences = {rank.rank: _sequences(rank, choices[rank.rank]) for rank in ranks}

    def newest(self) -> Cut | None:
        """The newest consistent cut, or None."""
        return next(self.newest_first(), None)

    def newest_first(self) -> Iterator[Cut]:
        """Every consistent cut, none before a cut that is newer in some ranks and older in none."""
        order = sorted(self._choices)
        start = self._below({rank: len(self._choices[rank]) - 1 for rank in order})
        if start is None:
            return
        seen = {tuple(start[rank] for rank in order)}
        waiting = [self._entry(start, order)]
        while waiting and len(seen) < _LARGEST_SEARCH:
            _, positions = heapq.heappop(waiting)
            position = dict(zip(order, positions, strict=True))
            yield {rank: self._choices[rank][position[rank]] for rank in order}
            for rank in order:
                lower = self._below(position | {rank: position[rank] - 1})
                if lower is None:
                    continue
                entry = self._entry(lower, order)
                if entry[1] not in seen:
                    seen.add(entry[1])
                    heapq.heappush(waiting, entry)

    def _entry(self, position: Mapping[int, int], order: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        return -sum(position.values()), tuple(position[rank] for rank in order)

    def _below(self, bound: Mapping[int, int]) -> dict[int, int] | None:
        """The newest consistent positions that exceed `bound` nowhere."""
        position = dict(bound)
        if any(index < 0 for index in position.values()):
            return None
        lowered = True
        while lowered:
            lowered = False
            for uid, members in self._members.items():
                done = {rank: self._sequence(rank, position[rank], uid) for rank in members}
                least = min(done.values())
                for rank in members:
                    while self._sequence(rank, position[rank], uid) > least:
                        position[rank] -= 1
                        lowered = True
                        if position[rank] < 0:
                            return None
        return position

    def _sequence(self, rank: int, position: int, uid: Uid) -> int:
        return self._sequences[rank][position].get(uid, 0)


def _sequences(rank: RankFacts, choices: Sequence[CommitFacts]) -> list[dict[Uid, int]]:
    """Per chosen commit: communicator -> collectives done, `_DESTROYED` where it is gone again."""
    of_number = _all_sequences(rank)
    return [of_number[choice.number] for choice in choices]


def _all_sequences(rank: RankFacts) -> dict[int, dict[Uid, int]]:
    of_number: dict[int, dict[Uid, int]] = {0: {}}
    known: set[Uid] = set()
    all_of_them = {commit.number: commit for commit in (*rank.stored, *rank.snapshots, *rank.commits)}
    for _, commit in sorted(all_of_them.items()):
        now = {(low, high): sequence for low, high, sequence in commit.communicators}
        of_number[commit.number] = {uid: _DESTROYED for uid in known - now.keys()} | now
        known |= now.keys()
    return of_number


def match(
    wanted: Manifest, offers: Mapping[int, Manifest], near: Collection[int] = (), turn: int = 0
) -> tuple[list[Copy], list[BufferFacts]]:
    """Pair what `wanted` needs with equal content in `offers` (rank -> manifest): (copies, what has none).

    Of the ranks that hold a content, those `near` (on the reader's host) come first.  `turn`: the how-manieth
    reader this is, from 0; each begins with another of them, so that no rank is read by all.  Among equals of
    one rank the n-th wanted one takes the n-th offered one.
    """
    offered: dict[Content, dict[int, list[int]]] = {}
    for rank in sorted(offers, key=lambda one: (one not in near, one)):
        for buffer in offers[rank]:
            if buffer.digest is not None:
                of_ranks = offered.setdefault((buffer.bytes, buffer.digest), {})
                of_ranks.setdefault(rank, []).append(buffer.handle)
    taken: dict[Content, int] = {}
    copies: list[Copy] = []
    missing: list[BufferFacts] = []
    for buffer in wanted:
        if not needs_replica(buffer):
            continue
        content = (buffer.bytes, buffer.digest if buffer.digest is not None else -1)
        holders = offered.get(content)
        if not holders:
            missing.append(buffer)
            continue
        source = _nth(holders, near, turn)
        equals = holders[source]
        ordinal = taken.get(content, 0)
        taken[content] = ordinal + 1
        handle = equals[ordinal % len(equals)]
        others = (other for other in equals if other != handle)
        copies.append(
            Copy(buffer.handle, source, handle, *content, tuple(itertools.islice(others, MOST_OTHERS)))
        )
    return copies, missing


def _nth(holders: Mapping[int, object], near: Collection[int], turn: int) -> int:
    """Of the ranks that hold a content, those near first."""
    close = sum(rank in near for rank in holders)
    return next(itertools.islice(holders, turn % (close or len(holders)), None))


def without_snapshots(facts: Facts) -> Plan | planner._Obstacle:
    """The first of all cuts, newest first, that will do."""
    choices: dict[int, list[CommitFacts]] = {}
    for rank in facts.ranks:
        choices[rank.rank], why_none = planner._reachable(rank, facts)
        if why_none:
            return planner._Obstacle(why_none, [rank.rank])
    leaving = [rank for rank in facts.ranks if not rank.stays]
    first_obstacle = ""
    for cut in CutSearch(facts.ranks, choices).newest_first():
        restarts, obstacle = _restarts(leaving, facts.ranks, cut)
        if not obstacle:
            return planner._go_back(facts, cut, restarts)
        first_obstacle = first_obstacle or obstacle
    reason = first_obstacle or planner._no_cut(facts)
    return planner._Obstacle(reason, [rank.rank for rank in leaving] or facts.fault.ranks)


def _restarts(
    leaving: Sequence[RankFacts], ranks: Sequence[RankFacts], cut: Cut
) -> tuple[list[Restart], str]:
    """How ranks that leave their servers get their state at `cut`, or a sentence: what has no replica."""
    restarts: list[Restart] = []
    for turn, rank in enumerate(leaving):
        commit = cut[rank.rank]
        if commit.number == 0:
            restarts.append(Restart(rank.rank, 0, ()))
            continue
        wanted = rank.manifests.get(commit.number)
        if wanted is None:
            return [], f"what rank {rank.rank} saved at commit {commit.number} cannot be read any more"
        reached = [other for other in ranks if other.rank not in rank.unread]
        same_step = [
            o for o in reached if o.alive and cut[o.rank].step == commit.step and cut[o.rank].has_manifest
        ]
        offers = {other.rank: other.manifests.get(cut[other.rank].number, ()) for other in same_step}
        if rank.alive and rank.rank not in rank.unread:
            offers = {rank.rank: wanted}
        near = {other.rank for other in same_step if other.host == rank.host}
        copies, missing = match(wanted, offers, near, turn)
        if missing and not rank.alive and (rolled := roll_forward(rank, commit, reached, cut)) is not None:
            restarts.append(Restart(rank.rank, commit.number, rolled[0], roll_forward=rolled[1]))
            continue
        if missing:
            return [], _no_replica(rank, commit, len(missing), missing[0].bytes, missing[0].handle, ranks)
        restarts.append(Restart(rank.rank, commit.number, tuple(copies), keeps_source=rank.alive))
    return restarts, ""


def _no_replica(
    rank: RankFacts, commit: CommitFacts, count: int, size: int, handle: int, ranks: Sequence[RankFacts]
) -> str:
    if not any(other.alive for other in ranks):
        who = named(other.rank for other in ranks)
        return f"every replica died: the device servers of ranks {who} are gone, and only they held the state"
    if rank.unread:
        who = named(sorted(rank.unread))
        return f"rank {rank.rank} does not reach the state of rank {who} (buffers without another: {count})"
    more = f" (and {count - 1} more)" if count > 1 else ""
    return (
        f"a buffer of rank {rank.rank} has neither a shadow nor a replica at step {commit.step}, "
        f"commit {commit.number}: handle {handle}, {size} bytes{more}"
    )
