"""Communicators of a job: which ranks have which of them, as far as their commits tell."""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence

from understudy.recovery.planning.facts import BEGINNING, CommitFacts, RankFacts, Uid

flat = itertools.chain.from_iterable


def is_young(rank: RankFacts) -> bool:
    """A rank that has not stepped and has no communicator yet; it may still join any of them."""
    newest = rank.newest
    return newest.step == 0 and not newest.uids


class Communicators:
    """Who has which communicator, or may get it from records behind its newest commit.

    They are numbered, as names take long to look up; a rank is its place among those that were given.

    While fewer ranks than one has members are known to have it, any other rank may be the missing one.  That
    has done no collective of it at any of its commits, so no consistent cut is behind the first one: this is
    what is known of such a communicator (`capped`), instead of all who may be in it.
    """

    def __init__(self, ranks: Sequence[RankFacts]) -> None:
        self.had: list[list[int]] = []
        """Rank -> all that it has had."""
        self.steady: list[bool] = []
        """Rank -> whether these are, in this order, what each of its commits has."""
        self._young: set[int] = set()
        numbers: defaultdict[Uid, int] = defaultdict(itertools.count().__next__)
        sizes: list[int] = []
        for place, rank in enumerate(ranks):
            commits = rank.commits
            if rank.stored or rank.snapshots:
                commits = (*rank.stored, *rank.snapshots, *commits)
            steady = not rank.begun and _are_alike(commits)
            uids: Collection[Uid]
            if steady:
                newest = commits[-1] if commits else BEGINNING
                uids = newest.uids
                sizes += newest.members or (0,) * len(uids)
            else:
                of_all = _had_at(commits) | dict(rank.begun)
                uids = of_all.keys()
                sizes += of_all.values()
            if is_young(rank):
                self._young.add(place)
            self.steady.append(steady)
            self.had.append([numbers[uid] for uid in uids])
        self.uids = list(numbers)
        """Communicator -> its name."""
        self._sizes = dict(zip(flat(self.had), sizes, strict=True))
        """Communicator -> how many members it has; 0: not known."""
        self._having = Counter(flat(self.had))
        """Communicator -> how many ranks have had it."""

    @functools.cached_property
    def members(self) -> list[list[int]]:
        """Communicator -> ranks that have had it."""
        members: list[list[int]] = [[] for _ in self.uids]
        for rank, had in enumerate(self.had):
            for number in had:
                members[number].append(rank)
        return members

    def capped(self) -> list[int]:
        """Those of which a rank that has not had it may be a member."""
        return [
            number for number, size in self._sizes.items()
            if self._having[number] != size and self._is_capped(number, size)
        ]  # fmt: skip

    def _is_capped(self, number: int, size: int) -> bool:
        if not size:  # not known
            return not self._young.issubset(self.members[number])
        return self._having[number] < min(size, len(self.steady))

    def groups(self) -> list[Collection[int]]:
        """Ranks that have something in common; of young ones that is not known yet, so any two may have."""
        young = set(self._young)
        groups: list[Collection[int]] = [young]
        for number, size in self._sizes.items():
            if self._having[number] < size:  # any rank may be a member
                return [range(len(self.steady))]
            if self._young and not size:
                young.update(self.members[number])
            else:
                groups.append(self.members[number])
        return groups


def _are_alike(commits: Sequence[CommitFacts]) -> bool:
    """Whether a rank had the same communicators at all of them.

    Commits that are alike share their tuples, mostly: these are compared first.
    """
    if not commits:
        return True
    uids, members = commits[-1].uids, commits[-1].members
    for commit in commits:
        if commit.uids is uids and commit.members is members:
            continue
        if commit.uids != uids or commit.members != members:
            return False
    return True


def _had_at(commits: Iterable[CommitFacts]) -> dict[Uid, int]:
    """Communicator -> members (0: not known), of all that a rank had at any of these commits."""
    had: dict[Uid, int] = {}
    for commit in commits:
        had.update(zip(commit.uids, commit.members or (0,) * len(commit.uids), strict=True))
    return had


def connected(ranks: Sequence[RankFacts], start: Iterable[int]) -> set[int]:
    """Ranks that share a communicator with one of `start`, transitively; `start` included."""
    groups = Communicators(ranks).groups()
    groups_of: list[list[int]] = [[] for _ in ranks]
    for number, group in enumerate(groups):
        for place in group:
            groups_of[place].append(number)
    reached = set(start)
    waiting = [place for place, rank in enumerate(ranks) if rank.rank in reached]
    looked_at: set[int] = set()
    while waiting:
        for number in groups_of[waiting.pop()]:
            if number not in looked_at:
                looked_at.add(number)
                more = [place for place in groups[number] if ranks[place].rank not in reached]
                reached.update(ranks[place].rank for place in more)
                waiting += more
    return reached
