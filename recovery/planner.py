"""The decision: facts -> plan.  Pure: no clock, no I/O, no randomness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from recovery.cuts import Cut, CutSearch, connected, is_young, kept_commits
from recovery.facts import CommitFacts, Facts, FaultKind, Phase, RankFacts
from recovery.replicas import Copy, match

MAXIMUM_ATTEMPTS = 3
"""A record that fails this often is wrong itself: its error belongs to the program (never loop)."""

COMPLETE_WITHIN = 32
"""Commits a rank may be ahead of its floor while waiting for a commit that can be rebuilt (half the ring)."""


class PlanName(Enum):
    """The rungs of the ladder (design.md §8) that exist."""

    RESTART_COPY_REPLAY = "restart-copy-replay"
    REWIND_IN_PLACE = "rewind-in-place"
    GIVE_UP = "give-up"


@dataclass(frozen=True)
class Restart:
    """Attach the rank to a ready server at `commit`, rebuild its state there with `copies`, replay."""

    rank: int
    commit: int
    copies: tuple[Copy, ...]


@dataclass(frozen=True)
class Rewind:
    """Take the rank's own server back to `commit` by its pre-images, replay."""

    rank: int
    commit: int


@dataclass(frozen=True)
class Lose:
    """End the session: its worker raises `message`."""

    rank: int
    message: str


@dataclass(frozen=True)
class Continue:
    """Let a parked rank that the fault does not concern go on."""

    rank: int


Action = Restart | Rewind | Lose | Continue


@dataclass(frozen=True)
class Plan:
    """What to do and, in a sentence, why."""

    name: PlanName
    reason: str
    actions: tuple[Action, ...]

    @property
    def targets(self) -> dict[int, int]:
        """Rank -> commit it goes back to."""
        return {action.rank: action.commit for action in self.actions if isinstance(action, Restart | Rewind)}


def plan(facts: Facts) -> Plan:
    """The cheapest plan that brings every rank to one consistent cut, or `GIVE_UP` with the reason."""
    fault = facts.fault
    if fault.attempts >= MAXIMUM_ATTEMPTS:
        return _give_up(
            facts, fault.message or f"rank {fault.ranks[0]} failed {fault.attempts} times at one record"
        )
    stranded = _stranded_by_departure(facts)
    if stranded:
        return _give_up(facts, stranded)
    choices: dict[int, list[CommitFacts]] = {}
    for rank in facts.ranks:
        choices[rank.rank], why_none = _reachable(rank, facts)
        if why_none:
            return _give_up(facts, why_none)
    dead = [rank for rank in facts.ranks if not rank.alive]
    first_obstacle = ""
    for cut in CutSearch(facts.ranks, choices).newest_first():
        restarts, obstacle = _restarts(dead, facts.ranks, cut)
        if not obstacle:
            return _go_back(facts, cut, restarts)
        first_obstacle = first_obstacle or obstacle
    return _give_up(facts, first_obstacle or "the ranks share no commit that all of them can still reach")


def consistent_floor(ranks: Sequence[RankFacts]) -> dict[int, int]:
    """Per rank the commit below which nothing will be asked for: the newest cut that every rank completed.

    A rank whose commits stay incomplete (state neither shadowed nor replicated) holds the floor back for
    `COMPLETE_WITHIN` commits only: after that, a reduced guarantee is better than a full log.
    """
    kept = {rank.rank: kept_commits(rank) for rank in ranks}
    complete = {
        rank: [commit for commit in commits if commit.number == 0 or commit.complete]
        for rank, commits in kept.items()
    }
    newest = CutSearch(ranks, kept).newest()
    cut = CutSearch(ranks, complete).newest()
    if newest is None:
        return {}
    if cut is None or any(newest[rank].number - cut[rank].number > COMPLETE_WITHIN for rank in cut):
        cut = newest
    return {rank: commit.number for rank, commit in cut.items()}


def _reachable(rank: RankFacts, facts: Facts) -> tuple[list[CommitFacts], str]:
    """Commits this rank can go back to, oldest first, or a sentence why there are none."""
    kept = kept_commits(rank)
    if not rank.alive:
        rebuildable = [
            commit for commit in kept if commit.number == 0 or (commit.complete and commit.has_manifest)
        ]
        if rebuildable:
            return rebuildable, ""
        if len(facts.ranks) == 1:
            return [], (
                f"the device server of rank {rank.rank} died, no other rank holds its state, "
                "and the start of its log has been released"
            )
        return (
            [],
            f"the device server of rank {rank.rank} died before any of its commits was saved completely",
        )
    if rank.optimizer_preimages:
        return kept, "" if kept else f"rank {rank.rank} keeps no commit that it could go back to"
    if rank.phase is Phase.OPTIMIZER:
        return [], f"rank {rank.rank} stood inside its optimizer step, where its driver keeps no pre-images"
    newest = [commit for commit in kept if commit.number == rank.newest.number]
    return newest, "" if newest else f"rank {rank.rank} keeps no commit that it could go back to"


def _restarts(dead: Sequence[RankFacts], ranks: Sequence[RankFacts], cut: Cut) -> tuple[list[Restart], str]:
    """How the dead ranks get their state at `cut`, or a sentence naming what has no replica."""
    restarts: list[Restart] = []
    for rank in dead:
        commit = cut[rank.rank]
        if commit.number == 0:
            restarts.append(Restart(rank.rank, 0, ()))
            continue
        wanted = rank.manifests.get(commit.number)
        if wanted is None:
            return [], f"what rank {rank.rank} saved at commit {commit.number} cannot be read any more"
        same_step = [
            o for o in ranks if o.alive and cut[o.rank].step == commit.step and cut[o.rank].has_manifest
        ]
        offers = {other.rank: other.manifests.get(cut[other.rank].number, ()) for other in same_step}
        copies, missing = match(wanted, offers)
        if missing:
            return [], _no_replica(rank, commit, len(missing), missing[0].bytes, missing[0].handle, ranks)
        restarts.append(Restart(rank.rank, commit.number, tuple(copies)))
    return restarts, ""


def _no_replica(
    rank: RankFacts, commit: CommitFacts, count: int, size: int, handle: int, ranks: Sequence[RankFacts]
) -> str:
    if not any(other.alive for other in ranks):
        who = ", ".join(str(other.rank) for other in ranks)
        return f"every replica died: the device servers of ranks {who} are gone, and only they held the state"
    more = f" (and {count - 1} more)" if count > 1 else ""
    return (
        f"a buffer of rank {rank.rank} has neither a shadow nor a replica at step {commit.step}, "
        f"commit {commit.number}: handle {handle}, {size} bytes{more}"
    )


def _stranded_by_departure(facts: Facts) -> str:
    """A sentence if a rank that is needed for replay has left."""
    if not facts.departed:
        return ""
    for rank in facts.ranks:
        if rank.rank in facts.fault.ranks and (is_young(rank) or any(c.communicators for c in rank.commits)):
            gone = ", ".join(str(rank) for rank in facts.departed)
            text = f"the worker of rank {gone} has ended, so nobody can take part in its collectives again"
            return f"{text} ({facts.fault.message})" if facts.fault.message else text
    return ""


def _go_back(facts: Facts, cut: Cut, restarts: Sequence[Restart]) -> Plan:
    actions: list[Action] = list(restarts)
    actions += [Rewind(rank.rank, cut[rank.rank].number) for rank in facts.ranks if rank.alive]
    where = ", ".join(f"rank {rank} at commit {cut[rank].number}" for rank in sorted(cut))
    if not restarts:
        cause = "a collective failed and every device server is alive"
        if facts.fault.kind is not FaultKind.COLLECTIVE_FAILED:
            cause = "every device server is alive"
        return Plan(PlanName.REWIND_IN_PLACE, f"{cause}; newest consistent cut: {where}", tuple(actions))
    died = ", ".join(str(restart.rank) for restart in restarts)
    copied = sum(copy.bytes for restart in restarts for copy in restart.copies)
    sources = sorted({copy.source for restart in restarts for copy in restart.copies})
    source = (
        f"{copied} bytes come from rank {', '.join(map(str, sources))}"
        if sources
        else "nothing has to be copied"
    )
    reason = f"the device server of rank {died} died; {source}; newest consistent cut: {where}"
    return Plan(PlanName.RESTART_COPY_REPLAY, reason, tuple(actions))


def _give_up(facts: Facts, reason: str) -> Plan:
    concerned = connected(facts.ranks, facts.fault.ranks) | {
        rank.rank for rank in facts.ranks if not rank.alive
    }
    actions: list[Action] = [
        Lose(rank.rank, reason) if rank.rank in concerned else Continue(rank.rank) for rank in facts.ranks
    ]
    return Plan(PlanName.GIVE_UP, reason, tuple(actions))
