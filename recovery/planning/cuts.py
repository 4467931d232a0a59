"""Consistent cuts: a commit per rank, so that a communicator's members have done equally many collectives.

Sequence numbers never fall along a rank's commits, so consistent cuts are closed under the element-wise
maximum: below any bound there is exactly one newest cut, and lowering whichever rank is ahead finds it.  Only
communicators of ranks that were lowered are looked at again, and no commit of a rank is left twice.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from understudy.recovery.planning.facts import BEGINNING, CommitFacts, RankFacts, Uid

Cut = dict[int, CommitFacts]
Positions = dict[int, int]
"""Rank -> index of one of its choices."""
Place = tuple[int, int]
"""`CommitFacts.place`."""

_DESTROYED = (1 << 64) - 1
"""Sequence of a communicator that a rank had and gave up: ahead of every number it ever reached.

The first commit behind that carries this itself, as no commit may know of one that came and went in between.
"""


def is_young(rank: RankFacts) -> bool:
    """A rank that has not stepped and has no communicator yet; it may still join any of them."""
    return rank.newest.step == 0 and not rank.newest.uids


class Communicators:
    """Who has which communicator, or may get it from records behind its newest commit.

    They are numbered, as names take long to look up.  While fewer ranks than one has members are known to
    have it, any other rank may be the missing one.  That has done no collective of it at any of its commits,
    so no consistent cut is behind the first one: this is what is known of such a communicator (`capped`),
    instead of all who may be in it.
    """

    def __init__(self, ranks: Sequence[RankFacts]) -> None:
        self.members: list[dict[int, int]] = []
        """Of each communicator: rank -> where it comes among those that this rank has had."""
        self.had: dict[int, list[int]] = {}
        """Rank -> numbers of all that it has had."""
        self.steady: set[int] = set()
        """Ranks that have had the same ones at all commits."""
        numbers: defaultdict[Uid, int] = defaultdict(itertools.count().__next__)
        sizes: list[Collection[int]] = []
        for rank in ranks:
            commits = rank.commits
            if rank.stored or rank.snapshots:
                commits = (*rank.stored, *rank.snapshots, *commits)
            uids: Collection[Uid]
            if _are_alike(commits):
                self.steady.add(rank.rank)
                commits = commits[-1:]
            if len(commits) == 1 and not rank.begun:
                uids = commits[0].uids
                sizes.append(commits[0].members or (0,) * len(uids))
            else:
                all_of_them = _had_at(commits) | dict(rank.begun)
                uids = all_of_them.keys()
                sizes.append(all_of_them.values())
            had = self.had[rank.rank] = [numbers[uid] for uid in uids]
            while len(self.members) < len(numbers):
                self.members.append({})
            for column, number in enumerate(had):
                self.members[number][rank.rank] = column
        self.uids = list(numbers)
        flat = itertools.chain.from_iterable
        self._sizes = dict(zip(flat(self.had.values()), flat(sizes), strict=True))
        """Members of each; 0: not known."""
        self._everybody = self.had.keys()
        self._young = {rank.rank for rank in ranks if is_young(rank)}

    def capped(self) -> list[int]:
        """Those of which a rank that has not had it may be a member."""
        return [
            number for number, having in enumerate(self.members)
            if len(having) != self._sizes[number] and self._is_capped(number)
        ]  # fmt: skip

    def _is_capped(self, number: int) -> bool:
        having = self.members[number]
        if not self._sizes[number]:  # not known
            return not self._young.issubset(having)
        return len(having) < min(self._sizes[number], len(self._everybody))

    def groups(self) -> list[Collection[int]]:
        """Ranks that have something in common; of young ones that is not known yet, so any two may have."""
        young = set(self._young)
        groups: list[Collection[int]] = [young]
        for number, having in enumerate(self.members):
            size = self._sizes[number]
            if len(having) < size:  # any rank may be a member
                groups.append(self._everybody)
            elif self._young and not size:
                young.update(having)
            else:
                groups.append(having)
        return groups


def _are_alike(commits: Sequence[CommitFacts]) -> bool:
    """Whether a rank had the same communicators at all of them."""
    if not commits:
        return True
    uids, members = commits[-1].uids, commits[-1].members
    for commit in commits:  # noqa: SIM110 (half the time)
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
    groups_of: dict[int, list[int]] = {}
    for place, group in enumerate(groups):
        for rank in group:
            groups_of.setdefault(rank, []).append(place)
    reached = set(start)
    waiting = list(reached)
    looked_at: set[int] = set()
    while waiting:
        for place in groups_of.get(waiting.pop(), ()):
            if place not in looked_at:
                looked_at.add(place)
                more = [rank for rank in groups[place] if rank not in reached]
                reached.update(more)
                waiting += more
    return reached


class CutSearch:
    """Consistent cuts among `choices`, some of each rank's commits (oldest first; `BEGINNING` may be one)."""

    def __init__(
        self,
        ranks: Sequence[RankFacts],
        choices: Mapping[int, Sequence[CommitFacts]],
        communicators: Communicators | None = None,
    ) -> None:
        """`communicators`: those of `ranks`, if they are known already."""
        self.choices = choices
        self._communicators = communicators or Communicators(ranks)
        self._ranks = {rank.rank: rank for rank in ranks}
        self._of_place: dict[int, dict[Place, dict[Uid, int]]] = {}
        """Sequences at all commits of those ranks that were asked for, and whose communicators changed."""
        members, uids = self._communicators.members, self._communicators.uids
        over = _Over(ranks, choices)
        capped = self._communicators.capped()
        self._over = {number for number in capped if over.everywhere(uids[number], members[number])}
        """Communicators that bar no cut any more."""
        self._capped = set(capped) - self._over

    def newest(self) -> Cut | None:
        """The newest consistent cut, or None."""
        positions = self.newest_positions()
        return None if positions is None else self.cut(positions)

    def newest_positions(self) -> Positions | None:
        """Where it is, or None."""
        positions = {rank: len(self.choices[rank]) - 1 for rank in self._ranks}
        if any(position < 0 for position in positions.values()):
            return None
        return positions if self._settle(positions, self._uneven(positions)) else None

    def below(self, positions: Positions, bounds: Mapping[int, int]) -> Positions | None:
        """The newest cut that is newer nowhere, and where these ranks are not above their bounds."""
        if any(bound < 0 for bound in bounds.values()):
            return None
        lowered = dict(positions)
        most: dict[int, int] = {}
        for rank, bound in bounds.items():
            lowered[rank] = min(lowered[rank], bound)
            done = self._at(rank, lowered[rank])
            for number, sequence in zip(self._communicators.had[rank], done, strict=True):
                most[number] = min(sequence, most.get(number, sequence))
        return lowered if self._settle(lowered, most) else None

    def cut(self, positions: Positions) -> Cut:
        """The commits there."""
        return {rank: self.choices[rank][position] for rank, position in positions.items()}

    def _at(self, rank: int, position: int) -> Sequence[int]:
        """Collectives done of each communicator that the rank has had; `_DESTROYED`: it is gone again."""
        choice = self.choices[rank][position]
        had = self._communicators.had[rank]
        if rank in self._communicators.steady and len(choice.uids) == len(had):
            return choice.sequences
        if rank not in self._of_place:
            self._of_place[rank] = _all_sequences(self._ranks[rank])
        done = self._of_place[rank][choice.place]
        return [done.get(self._communicators.uids[number], 0) for number in had]

    def _uneven(self, positions: Positions) -> dict[int, int]:
        """The least that a member has done of each communicator of which not all have done as much there.

        Mostly there are none: so all are compared in passing over the ranks once.
        """
        had = self._communicators.had
        least: list[int | None] = [None] * len(self._communicators.members)
        uneven: dict[int, int] = {}
        for rank, position in positions.items():
            for number, sequence in zip(had[rank], self._at(rank, position), strict=True):
                known = least[number]
                if known is None:
                    least[number] = sequence
                elif known != sequence:
                    least[number] = uneven[number] = min(known, sequence)
        return uneven | dict.fromkeys(self._capped, 0)

    def _settle(self, positions: Positions, bounds: Mapping[int, int]) -> bool:
        """Lower ranks until none is above these bounds, nor above a rank that was lowered; False: never.

        `bounds`: communicator -> most collectives of it that a rank may have done.
        """
        had, members = self._communicators.had, self._communicators.members
        most: list[float] = [math.inf] * len(members)
        for number in self._over:
            most[number] = -1  # lower than anybody would set it
        waiting: deque[int] = deque()
        for number, bound in bounds.items():
            if bound < most[number]:
                most[number] = bound
                waiting.append(number)
        done: dict[int, Sequence[int]] = {}
        """`_at` the positions, of ranks that were looked at."""
        while waiting:
            number = waiting.popleft()
            for rank, column in members[number].items():
                if rank not in done:
                    done[rank] = self._at(rank, positions[rank])
                if done[rank][column] <= most[number]:
                    continue
                while done[rank][column] > most[number]:
                    positions[rank] -= 1
                    if positions[rank] < 0:
                        return False
                    done[rank] = self._at(rank, positions[rank])
                for other, sequence in zip(had[rank], done[rank], strict=True):
                    if sequence < most[other]:
                        most[other] = sequence
                        waiting.append(other)
        return True


class _Over:
    """Which communicators all have given up for good, if some by records of which no commit tells any more.

    A rank keeps its last commits only, and one that was restored those that its newest life made: it may have
    forgotten a communicator that others remember.  Floors are a cut: what one rank has given up at its floor,
    all have at theirs.
    """

    def __init__(self, ranks: Sequence[RankFacts], choices: Mapping[int, Sequence[CommitFacts]]) -> None:
        self._ranks = {rank.rank: rank for rank in ranks}
        self._choices = choices
        self._given_up: dict[int, frozenset[Uid]] = {}

    def everywhere(self, uid: Uid, having: Iterable[int]) -> bool:
        """Whether each rank known to have had it gave it up before all that it may go back to."""
        return all(uid in self._before_all(rank) for rank in having)

    def _before_all(self, rank: int) -> frozenset[Uid]:
        if rank not in self._given_up:
            facts = self._ranks[rank]
            floor = next((c for c in facts.commits if c.number == facts.floor_commit), BEGINNING)
            oldest = in_order([floor], self._choices[rank])[0]
            sequences = _all_sequences(facts).get(oldest.place, {})
            self._given_up[rank] = frozenset(uid for uid, at in sequences.items() if at == _DESTROYED)
        return self._given_up[rank]


def _all_sequences(rank: RankFacts) -> dict[Place, dict[Uid, int]]:
    """The sequences of all commits of a rank."""
    of_place: dict[Place, dict[Uid, int]] = {BEGINNING.place: {}}
    known: set[Uid] = set()
    for commit in in_order(rank.stored, rank.snapshots, rank.commits):
        now = dict(zip(commit.uids, commit.sequences, strict=True))
        of_place[commit.place] = {uid: _DESTROYED for uid in known - now.keys()} | now
        known |= now.keys()
    return of_place


def in_order(*some: Sequence[CommitFacts]) -> list[CommitFacts]:
    """All of them, by records before them; at one record those of a later sequence count, and come last."""
    found = {commit.place: (which, commit) for which, commits in enumerate(some) for commit in commits}
    order = sorted(found.values(), key=lambda one: (one[1].index, one[0], one[1].number))
    return [commit for _, commit in order]


def kept_commits(rank: RankFacts) -> list[CommitFacts]:
    """Commits whose log is still there, oldest first; the beginning among them if nothing was released."""
    kept = [commit for commit in rank.commits if commit.number >= rank.floor_commit]
    if rank.log_complete_from_start and rank.floor_commit == 0:
        kept.insert(0, BEGINNING)
    return kept
