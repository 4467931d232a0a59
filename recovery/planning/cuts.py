"""Consistent cuts: a commit per rank, so that a communicator's members have done equally many collectives.

Sequence numbers never fall along a rank's commits, so consistent cuts are closed under the element-wise
maximum: below any bound there is exactly one newest cut, and lowering whichever rank is ahead finds it.  Only
communicators of ranks that were lowered are looked at again, and no commit of a rank is left twice.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence

from understudy.recovery.planning.communicators import Communicators, flat
from understudy.recovery.planning.facts import BEGINNING, CommitFacts, RankFacts, Uid

Cut = dict[int, CommitFacts]
Positions = list[int]
"""Of each rank: index of one of its choices."""
Place = tuple[int, int]
"""`CommitFacts.place`."""

_DESTROYED = (1 << 64) - 1
"""Sequence of a communicator that a rank had and gave up: ahead of every number it ever reached.

The first commit behind that carries this itself, as no commit may know of one that came and went in between.
"""


class CutSearch:
    """Consistent cuts among `choices`, some of each rank's commits (oldest first; `BEGINNING` may be one).

    It stands at one cut at a time, and knows the sequences there; for another one it looks at those ranks
    only that stand elsewhere in it.  A rank is its place among `ranks`, and communicators are numbers.
    """

    def __init__(
        self,
        ranks: Sequence[RankFacts],
        choices: Mapping[int, Sequence[CommitFacts]],
        communicators: Communicators | None = None,
    ) -> None:
        """`choices`: by a rank's number; `communicators`: those of `ranks`, if they are known already."""
        self.choices = [choices[rank.rank] for rank in ranks]
        self._communicators = communicators or Communicators(ranks)
        self._ranks = ranks
        self._of_place: dict[int, dict[Place, dict[Uid, int]]] = {}
        """Sequences at all commits of those ranks that were asked for, and whose communicators changed."""
        capped = self._communicators.capped()
        over = _Over(ranks, self.choices)
        self._over = {number for number in capped if over.everywhere(number, self._communicators)}
        """Communicators that bar no cut any more."""
        self._capped = set(capped) - self._over
        self._positions: Positions = []
        """Where it stands."""
        self._done: list[Sequence[int]] = []
        """Rank -> `_at` there."""

    def newest(self) -> Cut | None:
        """The newest consistent cut, or None."""
        positions = self.newest_positions()
        return None if positions is None else self.cut(positions)

    def newest_positions(self) -> Positions | None:
        """Where it is, or None."""
        self._positions = [len(choices) - 1 for choices in self.choices]
        if -1 in self._positions:
            return None
        self._done = list(map(self._at, range(len(self._positions)), self._positions))
        return list(self._positions) if self._settle(self._uneven()) else None

    def below(self, positions: Positions, bounds: Mapping[int, int]) -> Positions | None:
        """The newest cut that is newer nowhere, and where these ranks are not above their bounds."""
        if any(bound < 0 for bound in bounds.values()):
            return None
        lowered = list(positions)
        for rank, bound in bounds.items():
            lowered[rank] = min(lowered[rank], bound)
        for rank, (position, other) in enumerate(zip(self._positions, lowered, strict=True)):
            if position != other:
                self._done[rank] = self._at(rank, other)
        self._positions = lowered
        most: dict[int, int] = {}
        for rank in bounds:
            for number, sequence in zip(self._communicators.had[rank], self._done[rank], strict=True):
                most[number] = min(sequence, most.get(number, sequence))
        return list(self._positions) if self._settle(most) else None

    def cut(self, positions: Positions) -> Cut:
        """The commits there."""
        chosen = map(operator.getitem, self.choices, positions)
        return {rank.rank: commit for rank, commit in zip(self._ranks, chosen, strict=True)}

    def _at(self, rank: int, position: int) -> Sequence[int]:
        """Collectives done of each communicator that the rank has had; `_DESTROYED`: it is gone again."""
        choice = self.choices[rank][position]
        if self._communicators.steady[rank] and choice.uids:
            return choice.sequences
        if rank not in self._of_place:
            self._of_place[rank] = _all_sequences(self._ranks[rank])
        done = self._of_place[rank][choice.place]
        return [done.get(self._communicators.uids[number], 0) for number in self._communicators.had[rank]]

    def _uneven(self) -> dict[int, int]:
        """The least that a member has done of each communicator of which not all have done as much here."""
        had = self._communicators.had
        of_last = dict(zip(flat(had), flat(self._done), strict=True))
        uneven: dict[int, int] = {}
        for number, sequence in zip(flat(had), flat(self._done), strict=True):
            if sequence != of_last[number]:
                uneven[number] = min(sequence, uneven.get(number, of_last[number]))
        return uneven | dict.fromkeys(self._capped, 0)

    def _settle(self, bounds: Mapping[int, int]) -> bool:
        """Lower ranks until none is above these bounds, nor above a rank that was lowered; False: never.

        `bounds`: communicator -> most collectives of it that a rank may have done.
        """
        if not bounds:
            return True
        done, positions = self._done, self._positions
        had, members = self._communicators.had, self._communicators.members
        most: list[float] = [math.inf] * len(members)
        for number in bounds.keys() - self._over:
            most[number] = bounds[number]
        fallen = set(bounds)
        while fallen:
            concerned = set(flat(members[number] for number in fallen))
            fallen = set()
            for rank in sorted(concerned):  # those that go back together lie together in memory
                for number, sequence in zip(had[rank], done[rank], strict=True):
                    if sequence > most[number]:
                        break
                else:
                    continue
                if positions[rank] == 0:
                    return False
                positions[rank] -= 1
                done[rank] = self._at(rank, positions[rank])
                for number, sequence in zip(had[rank], done[rank], strict=True):
                    if sequence != most[number] and number not in self._over:
                        most[number] = min(sequence, most[number])
                        fallen.add(number)
        return True


class _Over:
    """Which communicators all have given up for good, if some by records of which no commit tells any more.

    A rank keeps its last commits only, and one that was restored those that its newest life made: it may have
    forgotten a communicator that others remember.  Floors are a cut: what one rank has given up at its floor,
    all have at theirs.
    """

    def __init__(self, ranks: Sequence[RankFacts], choices: Sequence[Sequence[CommitFacts]]) -> None:
        self._ranks = ranks
        self._choices = choices
        self._given_up: dict[int, frozenset[Uid]] = {}

    def everywhere(self, number: int, communicators: Communicators) -> bool:
        """Whether each rank known to have had it gave it up before all that it may go back to."""
        uid = communicators.uids[number]
        return all(uid in self._before_all(rank) for rank in communicators.members[number])

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
