"""How ranks that leave their servers get their state, and at which of the cuts they all can.

Where one does not at a cut, few other cuts have to be looked at.  A rank lacks a content that no other holds
at that step, here or further back: then it goes back itself in every cut that will do, and all such ranks do
so at once.  Another one holds it further back: then either the one goes back or the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from understudy.recovery.base.naming_ranks import named
from understudy.recovery.planning.cuts import Cut, CutSearch, Positions
from understudy.recovery.planning.facts import BufferFacts, CommitFacts, Manifest, RankFacts
from understudy.recovery.planning.replicas import Content, Copy, Holders, wanted_of
from understudy.recovery.planning.roll_forward import RollForward, evidence_commit, roll_forward

MOST_CUTS = 4096
"""So many are looked at; there is a choice only where something is held further back."""


@dataclass(frozen=True)
class Restart:
    """Attach the rank to a ready server at `commit`, rebuild its state there with `copies`, replay.

    `keeps_source`: its own old server is rewound first and is where the copies come from.
    `roll_forward`: `commit` lies right before an optimizer step that others have finished, and some copies
    are of the step's end.
    """

    rank: int
    commit: int
    copies: tuple[Copy, ...]
    keeps_source: bool = False
    roll_forward: RollForward | None = None


@dataclass(frozen=True)
class _Lack:
    """Who does not get its state at a commit, and what of it is held by nobody; None: that is not known.

    `place`: of the rank among all.
    """

    place: int
    rank: RankFacts
    commit: CommitFacts
    missing: Sequence[BufferFacts] | None


_Step = tuple[int, frozenset[int]]
"""Optimizer steps done, and ranks that a reader does not reach."""


class Restarts:
    """Finds where ranks that leave their servers get their state from, at cuts of one search."""

    def __init__(self, ranks: Sequence[RankFacts], search: CutSearch) -> None:
        self._ranks = ranks
        self._search = search
        self._alive = [rank for rank in ranks if rank.alive]
        self._by_number = sorted(range(len(ranks)), key=[rank.rank for rank in ranks].__getitem__)
        self._leaving = [(place, rank) for place, rank in enumerate(ranks) if not rank.stays]

    def newest(self) -> tuple[tuple[Cut, list[Restart]] | None, str]:
        """The newest cut at which all get their state, and how; why the newest of all will not do."""
        top = self._search.newest_positions()
        if top is None:
            return None, ""
        waiting = [(*self._order(top), top)]
        seen = {waiting[0][:2]}
        obstacle = ""
        while waiting and len(seen) < MOST_CUTS:
            *_, positions = heapq.heappop(waiting)
            cut = self._search.cut(positions)
            restarts, lacking = self._at(cut)
            if not lacking:
                return (cut, restarts), ""
            obstacle = obstacle or self._obstacle(lacking[0])
            for lower in self._below(positions, lacking):
                if (order := self._order(lower)) not in seen:
                    seen.add(order)
                    heapq.heappush(waiting, (*order, lower))
        return None, obstacle

    def _order(self, positions: Positions) -> tuple[int, tuple[int, ...]]:
        """Newer cuts first."""
        return -sum(positions), tuple(map(positions.__getitem__, self._by_number))

    def _at(self, cut: Cut) -> tuple[list[Restart], list[_Lack]]:
        wanted = {rank.rank: rank.manifests.get(cut[rank.rank].number) for _, rank in self._leaving}
        readers: dict[_Step, list[tuple[str, Manifest]]] = {}
        for _, rank in self._leaving:
            commit, manifest = cut[rank.rank], wanted[rank.rank]
            if commit.number != 0 and manifest is not None and not _reads_itself(rank):
                readers.setdefault((commit.step, rank.unread), []).append((rank.host, manifest))
        holders = {
            at: Holders(self._holding(cut, at), cut, some, len(self._leaving)) for at, some in readers.items()
        }
        restarts: list[Restart] = []
        lacking: list[_Lack] = []
        for turn, (place, rank) in enumerate(self._leaving):
            commit, manifest = cut[rank.rank], wanted[rank.rank]
            if commit.number == 0:
                restarts.append(Restart(rank.rank, 0, ()))
                continue
            if manifest is None:
                lacking.append(_Lack(place, rank, commit, None))
                continue
            if _reads_itself(rank):
                own = Holders([rank], cut, [(rank.host, manifest)])
                copies, missing = own.match(manifest, rank.host)
            else:
                copies, missing = holders[commit.step, rank.unread].match(manifest, rank.host, turn)
            if not missing:
                restarts.append(Restart(rank.rank, commit.number, tuple(copies), keeps_source=rank.alive))
                continue
            rolled = self._rolled(rank, commit, cut)
            if rolled is not None:
                restarts.append(rolled)
            else:
                lacking.append(_Lack(place, rank, commit, missing))
        return restarts, lacking

    def _holding(self, cut: Cut, at: _Step) -> list[RankFacts]:
        """Ranks whose state can be read, and is of that step."""
        step, unread = at
        return [
            rank for rank in self._alive
            if (commit := cut[rank.rank]).step == step and commit.has_manifest and rank.rank not in unread
        ]  # fmt: skip

    def _rolled(self, rank: RankFacts, commit: CommitFacts, cut: Cut) -> Restart | None:
        if not _may_roll(rank, commit):
            return None
        reached = [other for other in self._ranks if other.rank not in rank.unread]
        found = roll_forward(rank, commit, reached, cut)
        return None if found is None else Restart(rank.rank, commit.number, found[0], roll_forward=found[1])

    def _below(self, positions: Positions, lacking: Sequence[_Lack]) -> Iterator[Positions]:
        """Cuts below this one: each below it that will do is one of them, or below one."""
        hopeless: dict[int, int] = {}
        either: list[dict[int, int]] = []
        further_back = self._held_further_back(positions, lacking)
        for lack in lacking:
            back = {lack.place: positions[lack.place] - 1}
            ways: list[dict[int, int]] = []
            if _may_roll(lack.rank, lack.commit):
                ways = [
                    {place: positions[place] - 1} for place, other in enumerate(self._ranks) if other.alive
                ]
            elif not _reads_itself(lack.rank) and lack.missing is not None:
                held = further_back[lack.commit.step, lack.rank.unread]
                wanted = wanted_of(tuple(lack.missing))
                if len(wanted) and all(b.digest is not None for b in lack.missing) and wanted <= held.keys():
                    ways = [{other: position} for other, position in held[min(wanted)].items()]
            if not ways:
                hopeless |= back
            elif not either:
                either = [back, *ways]
        for bounds in [hopeless] if hopeless else either:
            if (lower := self._search.below(positions, bounds)) is not None:
                yield lower

    def _held_further_back(
        self, positions: Positions, lacking: Sequence[_Lack]
    ) -> dict[_Step, dict[Content, dict[int, int]]]:
        """Content -> place of a rank -> its newest position below its present one at which it holds that."""
        wanted: dict[_Step, set[Content]] = {}
        for lack in lacking:
            of_step = wanted.setdefault((lack.commit.step, lack.rank.unread), set())
            if lack.missing is not None and not _reads_itself(lack.rank):
                of_step |= wanted_of(tuple(lack.missing))
        found: dict[_Step, dict[Content, dict[int, int]]] = {}
        for (step, unread), contents in wanted.items():
            held = found[step, unread] = {}
            for place, rank in enumerate(self._ranks) if contents else ():
                if not rank.alive or rank.rank in unread:
                    continue
                choices = self._search.choices[place]
                for position in range(positions[place] - 1, -1, -1):
                    commit = choices[position]
                    if commit.step != step or not commit.has_manifest or commit.number == 0:
                        continue
                    for buffer in rank.manifests.get(commit.number, ()):
                        if (content := (buffer.bytes, buffer.digest)) in contents:
                            held.setdefault(content, {}).setdefault(place, position)
        return found

    def _obstacle(self, lack: _Lack) -> str:
        rank, commit, missing = lack.rank, lack.commit, lack.missing
        if missing is None:
            return f"what rank {rank.rank} saved at commit {commit.number} cannot be read any more"
        if not self._alive:
            gone = [other.rank for other in self._ranks if not other.sealed]
            inside = [other.rank for other in self._ranks if other.sealed]
            lost = [f"the device servers of ranks {named(gone)} are gone"] if gone else []
            if inside:
                stood = "stood inside its optimizer step, where its driver keeps no pre-images"
                lost.append(f"rank {named(inside)} {stood}")
            return f"every replica died: {', '.join(lost)}, and only they held the state"
        if rank.unread:
            who = named(sorted(rank.unread))
            count = len(missing)
            return (
                f"rank {rank.rank} does not reach the state of rank {who} (buffers without another: {count})"
            )
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        return (
            f"a buffer of rank {rank.rank} has neither a shadow nor a replica at step {commit.step}, "
            f"commit {commit.number}: handle {missing[0].handle}, {missing[0].bytes} bytes{more}"
        )


def _reads_itself(rank: RankFacts) -> bool:
    """Whether its old server has its state."""
    return rank.alive and rank.rank not in rank.unread


def _may_roll(rank: RankFacts, commit: CommitFacts) -> bool:
    """Whether an optimizer step that others have finished begins there."""
    return (
        not rank.alive
        and commit.optimizer
        and not rank.refuses(commit)
        and evidence_commit(rank.commits, commit) is not None
    )
