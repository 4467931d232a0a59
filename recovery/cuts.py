"""Consistent cuts: a commit per rank, so that a communicator's members have done equally many collectives.

Sequence numbers never fall along a rank's commits, so consistent cuts are closed under the
element-wise maximum: below any bound there is exactly one newest cut, and lowering whichever rank
is ahead finds it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence

from understudy.recovery.facts import BEGINNING, CommitFacts, RankFacts, Uid

Cut = dict[int, CommitFacts]

_DESTROYED = (1 << 64) - 1
"""Sequence of a communicator that a rank had and gave up: ahead of every number it ever reached.

The first commit behind that carries this itself, as no commit may know of one that came and went in between.
"""
_LARGEST_SEARCH = 4096


def is_young(rank: RankFacts) -> bool:
    """A rank that has not stepped and has no communicator yet; it may still join any of them."""
    return rank.newest.step == 0 and not rank.newest.communicators


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


class CutSearch:
    """Consistent cuts among `choices`, some of each rank's commits (oldest first; `BEGINNING` may be one)."""

    def __init__(self, ranks: Sequence[RankFacts], choices: Mapping[int, Sequence[CommitFacts]]) -> None:
        self._choices = {rank.rank: list(choices[rank.rank]) for rank in ranks}
        self._members = {uid: having for uid, having in memberships(ranks).items() if len(having) > 1}
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
    of_number: dict[int, dict[Uid, int]] = {0: {}}
    known: set[Uid] = set()
    for commit in by_number(rank.stored, rank.snapshots, rank.commits):
        now = {(low, high): sequence for low, high, sequence in commit.communicators}
        of_number[commit.number] = {uid: _DESTROYED for uid in known - now.keys()} | now
        known |= now.keys()
    return [of_number[choice.number] for choice in choices]


def by_number(*some: Sequence[CommitFacts]) -> list[CommitFacts]:
    """All of them, oldest first; of two with one number that of the later sequence."""
    found = {commit.number: commit for commits in some for commit in commits}
    return [found[number] for number in sorted(found)]


def kept_commits(rank: RankFacts) -> list[CommitFacts]:
    """Commits whose log is still there, oldest first; the beginning among them if nothing was released."""
    kept = [commit for commit in rank.commits if commit.number >= rank.floor_commit]
    if rank.log_complete_from_start and rank.floor_commit == 0:
        kept.insert(0, BEGINNING)
    return kept
