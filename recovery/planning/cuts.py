"""Consistent cuts: a commit per rank, so that a communicator's members have done equally many collectives.

Sequence numbers never fall along a rank's commits, so consistent cuts are closed under the element-wise
maximum: below any bound there is exactly one newest cut, and lowering whichever rank is ahead finds it.  Only
communicators of ranks that were lowered are looked at again, and no commit of a rank is left twice.
"""

from __future__ import annotations

from collections import deque
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
    return rank.newest.step == 0 and not rank.newest.communicators


class Communicators:
    """Who has which communicator, or may get it from records behind its newest commit.

    While fewer ranks than it has members are known to have it, any other rank may be the missing one.  That
    has done no collective of it at any of its commits, so no consistent cut is behind the first one: this is
    what is known of such a communicator (`capped`), instead of all who may be in it.
    """

    def __init__(self, ranks: Sequence[RankFacts]) -> None:
        self.members: dict[Uid, list[int]] = {}
        self.had: dict[int, Collection[Uid]] = {}
        """Rank -> all that it has had."""
        self.steady: set[int] = set()
        """Ranks that have had the same ones at all commits."""
        self._sizes: dict[Uid, int] = {}
        members, sizes = self.members, self._sizes
        for rank in ranks:
            commits = (*rank.stored, *rank.snapshots, *rank.commits)
            had: Collection[Uid]
            if _are_alike(commits):
                self.steady.add(rank.rank)
                commits = commits[-1:]
            if len(commits) == 1 and not rank.begun:
                (commit,) = commits
                had = commit.uids
                sizes.update(zip(had, commit.members or (0,) * len(had), strict=True))
            else:
                all_of_them = _had_at(commits) | dict(rank.begun)
                had = all_of_them.keys()
                sizes.update(all_of_them)
            self.had[rank.rank] = had
            for uid in had:
                if uid in members:
                    members[uid].append(rank.rank)
                else:
                    members[uid] = [rank.rank]
        self._everybody = {rank.rank for rank in ranks}
        self._young = {rank.rank for rank in ranks if is_young(rank)}

    def open(self, uid: Uid) -> bool:
        """Whether any rank may be a member of it."""
        return len(self.members[uid]) < self._sizes[uid]

    def capped(self, uid: Uid) -> bool:
        """Whether a rank that has not had it may be a member."""
        having = self.members[uid]
        if not self._sizes[uid]:  # not known
            return not self._young.issubset(having)
        return len(having) < min(self._sizes[uid], len(self._everybody))

    def groups(self) -> list[Collection[int]]:
        """Ranks that have something in common; of young ones that is not known yet, so any two may have."""
        young = set(self._young)
        groups: list[Collection[int]] = [young]
        for uid, having in self.members.items():
            if self.open(uid):
                groups.append(self._everybody)
            elif self._young and not self._sizes[uid]:
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
        self._sequences: dict[int, _Sequences] = {}
        """Of those ranks that were asked for."""
        self._capped: dict[Uid, bool] = {}
        """Communicators that bar any cut."""
        over = _Over(ranks, choices)
        for uid, having in self._communicators.members.items():
            capped = self._communicators.capped(uid)
            if capped and over.everywhere(uid, having):
                continue
            if capped or len(having) > 1:
                self._capped[uid] = capped

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
        touched: dict[Uid, None] = {}
        for rank, bound in bounds.items():
            lowered[rank] = min(lowered[rank], bound)
            touched.update(dict.fromkeys(self._of_rank(rank)))
        return lowered if self._settle(lowered, touched) else None

    def cut(self, positions: Positions) -> Cut:
        """The commits there."""
        return {rank: self.choices[rank][position] for rank, position in positions.items()}

    def _of_rank(self, rank: int) -> list[Uid]:
        return [uid for uid in self._communicators.had[rank] if uid in self._capped]

    def _at(self, rank: int, position: int) -> Mapping[Uid, int]:
        """Communicator -> collectives done."""
        found = self._sequences.get(rank)
        if found is None:
            steady = rank in self._communicators.steady
            of_place = {} if steady else _all_sequences(self._ranks[rank])
            found = self._sequences[rank] = _Sequences(self.choices[rank], of_place)
        return found.at(position)

    def _uneven(self, positions: Positions) -> list[Uid]:
        """Communicators of which not all members are known to have done equally much there.

        Mostly none: so all are counted in passing over the ranks once, instead of over each one's members.
        """
        steady, members = self._communicators.steady, self._communicators.members
        uneven = {uid for uid, capped in self._capped.items() if capped}
        told = dict.fromkeys(self._capped, 0)
        first: dict[Uid, int] = {}
        for rank, position in positions.items():
            commit = self.choices[rank][position]
            done = commit.done if rank in steady else self._at(rank, position).items()
            for uid, sequence in done:
                if uid in told:
                    told[uid] += 1
                    if first.setdefault(uid, sequence) != sequence:
                        uneven.add(uid)
        return [uid for uid, times in told.items() if uid in uneven or times < len(members[uid])]

    def _settle(self, positions: Positions, uids: Iterable[Uid]) -> bool:
        """Lower ranks until these communicators, and those of all who were lowered, agree; False: never."""
        waiting = deque(uids)
        queued = set(waiting)
        while waiting:
            uid = waiting.popleft()
            queued.discard(uid)
            members = self._communicators.members[uid]
            done = [self._at(rank, positions[rank]).get(uid, 0) for rank in members]
            least = 0 if self._capped[uid] else min(done)
            if max(done) == least:
                continue
            for rank, sequence in zip(members, done, strict=True):
                if sequence == least:
                    continue
                position = positions[rank]
                while sequence > least:
                    position -= 1
                    if position < 0:
                        return False
                    sequence = self._at(rank, position).get(uid, 0)
                positions[rank] = position
                more = [other for other in self._of_rank(rank) if other not in queued]
                queued.update(more)
                waiting += more
        return True


class _Sequences:
    """Per chosen commit of a rank: communicator -> collectives done, `_DESTROYED` where it is gone again."""

    def __init__(self, choices: Sequence[CommitFacts], of_place: Mapping[Place, dict[Uid, int]]) -> None:
        """`of_place`: those of each commit; empty for a rank that has always had the same communicators."""
        self._choices = choices
        self._known = [of_place[choice.place] if of_place else None for choice in choices]

    def at(self, position: int) -> dict[Uid, int]:
        found = self._known[position]
        if found is None:
            of = self._choices[position].communicators
            found = self._known[position] = {(low, high): sequence for low, high, sequence in of}
        return found


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
        now = {(low, high): sequence for low, high, sequence in commit.communicators}
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
