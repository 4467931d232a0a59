"""The decision: facts -> plan.  Pure: no clock, no I/O, no randomness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from understudy.recovery.base.naming_ranks import named, placed
from understudy.recovery.machine.collector import without_collector
from understudy.recovery.planning.communicators import Communicators, connected, is_young
from understudy.recovery.planning.cuts import Cut, CutSearch, Place, in_order, kept_commits
from understudy.recovery.planning.facts import (
    BEGINNING,
    ECHOES,
    CommitFacts,
    Facts,
    FaultFacts,
    FaultKind,
    Phase,
    RankFacts,
)
from understudy.recovery.planning.restarts import Restart, Restarts
from understudy.recovery.planning.roll_forward import floor_for_roll_forward

MAXIMUM_ATTEMPTS = 3
"""A record that fails this often is wrong itself: its error belongs to the program (never loop)."""

COMPLETE_WITHIN = 32
"""Commits a rank may be ahead of its floor while waiting for a commit that can be rebuilt (half the ring)."""


class PlanName(Enum):
    """The rungs of the ladder (design.md §8) that exist."""

    RESTART_COPY_REPLAY = "restart-copy-replay"
    ROLL_FORWARD = "roll-forward"
    STASH_RESTART_RESTORE = "stash-restart-restore"
    REWIND_IN_PLACE = "rewind-in-place"
    RESTORE_SNAPSHOT_REPLAY = "restore-snapshot-replay"
    RESTORE_STORED_REPLAY = "restore-stored-replay"
    GIVE_UP = "give-up"
    END_WITH_PEER = "end-with-peer"
    """Nothing is broken: the program of a peer has ended, and so does what waited for it in a collective."""


ENDS = (PlanName.GIVE_UP, PlanName.END_WITH_PEER)
"""After these the ranks do not go on."""


@dataclass(frozen=True)
class Rewind:
    """Take the rank's own server back to `commit` by its pre-images, replay."""

    rank: int
    commit: int


@dataclass(frozen=True)
class Reload:
    """Bring the rank to `commit` by its snapshot (0: the beginning), replay; on a new server if `fresh`.

    `stored`: the snapshot comes from storage first, into memory that no server may be using.
    """

    rank: int
    commit: int
    fresh: bool
    stored: bool = False


@dataclass(frozen=True)
class FailRank:
    """End the session: its worker raises `message`."""

    rank: int
    message: str


Action = Restart | Rewind | Reload | FailRank


@dataclass(frozen=True)
class Plan:
    """What to do and, in a sentence, why."""

    name: PlanName
    reason: str
    actions: tuple[Action, ...]
    cut: Cut = field(default_factory=dict, compare=False)
    """Rank -> the commit it goes back to."""

    @property
    def targets(self) -> dict[int, int]:
        """Rank -> commit it goes back to."""
        return {
            action.rank: action.commit
            for action in self.actions
            if isinstance(action, Restart | Rewind | Reload)
        }

    @property
    def repaired(self) -> set[int]:
        """Ranks that it recovers: those that only go back as others do are not."""
        for kind in (Restart, Reload, Rewind):
            if ranks := {action.rank for action in self.actions if isinstance(action, kind)}:
                return ranks
        return set()

    @property
    def replaced(self) -> frozenset[int]:
        """Ranks that get another server."""
        return frozenset(
            action.rank
            for action in self.actions
            if isinstance(action, Restart) or (isinstance(action, Reload) and action.fresh)
        )


@without_collector()
def plan(facts: Facts) -> Plan:
    """The cheapest plan that brings every rank to one consistent cut, or one of `ENDS` with the reason.

    No job is given up because a rank cannot go where it was to go, or before what was not reached is tried
    once more.
    """
    chosen = _plan(facts)
    if chosen.name in ENDS and any(rank.unread for rank in facts.ranks):
        return plan(replace(facts, ranks=tuple(replace(rank, unread=frozenset()) for rank in facts.ranks)))
    leaving = [rank.rank for rank in facts.ranks if rank.leaving] if chosen.name in ENDS else []
    if not leaving:
        return chosen
    without = plan(replace(facts, ranks=tuple(replace(rank, leaving=False) for rank in facts.ranks)))
    if without.name in ENDS:
        return without
    return replace(
        without, reason=f"{without.reason}; rank {named(leaving)} could not be moved: {chosen.reason}"
    )


def _plan(facts: Facts) -> Plan:
    fault = facts.fault
    if not facts.ranks:  # nothing is recovered by it
        return Plan(_name_of_end(fault), "the workers of all ranks that it concerned have ended", ())
    if fault.attempts >= MAXIMUM_ATTEMPTS:
        reason = fault.message or f"rank {fault.ranks[0]} failed {fault.attempts} times at one record"
        return _give_up(facts, reason, fault.ranks)
    if facts.not_replayable:
        reason = f"replay would give other numbers: {facts.not_replayable}"
        return _give_up(facts, reason, fault.ranks)
    stranded = _stranded_by_departure(facts)
    if stranded:
        lost = _give_up(facts, stranded, [rank.rank for rank in facts.ranks])
        return replace(lost, name=_name_of_end(fault))
    if len(facts.homeless) > facts.free_devices:
        return _give_up(facts, _no_device(facts), facts.homeless)
    if fault.kind is FaultKind.REHEARSAL and (rehearsed := _from_storage(facts)) is not None:
        return rehearsed
    refused = [rank.rank for rank in facts.ranks if rank.refused_commit and not rank.alive]
    if refused:  # older copies are likely to lack the same
        reason = f"rank {named(refused)} could not go on with what others hold of its state"
        if (found := _reload(facts, reason, refused=False)) is not None:
            return found
    without = _without_snapshots(facts)
    return without if isinstance(without, Plan) else _from_snapshots(facts, without)


def goes_back_a_minibatch(facts: Facts) -> bool:
    """Whether nobody loses its server, or goes back further than to where its minibatch has begun.

    By pre-images, and a rank alone by the snapshot that its server has taken there: enough for a validation.
    """
    chosen = plan(facts)
    if chosen.name is not PlanName.RESTORE_SNAPSHOT_REPLAY:
        return chosen.name is PlanName.REWIND_IN_PLACE
    return not chosen.replaced and all(
        (chosen.targets.get(rank.rank), rank.newest.step)
        in [(snapshot.number, snapshot.step) for snapshot in rank.snapshots]
        for rank in facts.ranks
    )


def parked_anywhere(facts: Facts) -> Facts:
    """These facts as they may be once the ranks are parked: each may be in its optimizer step by then."""
    ranks = tuple(replace(rank, phase=Phase.OPTIMIZER) for rank in facts.ranks)
    return replace(facts, ranks=ranks)


@dataclass(frozen=True)
class _Obstacle:
    """Why a way is barred, and by which ranks."""

    reason: str
    culprits: Sequence[int]


def _without_snapshots(facts: Facts) -> Plan | _Obstacle:
    """The newest cut that pre-images, shadows and replicas lead to; or why they lead to none."""
    choices: dict[int, list[CommitFacts]] = {}
    for rank in facts.ranks:
        choices[rank.rank], why_none = _reachable(rank, facts)
        if why_none:
            return _Obstacle(why_none, [rank.rank])
    found, obstacle = Restarts(facts.ranks, CutSearch(facts.ranks, choices)).newest()
    if found is not None:
        return _go_back(facts, *found)
    reason = obstacle or _no_cut(facts)
    leaving = [rank.rank for rank in facts.ranks if not rank.stays]
    return _Obstacle(reason, leaving or facts.fault.ranks)


def _no_cut(facts: Facts) -> str:
    reason = "the ranks share no commit that all of them can still reach"
    refused = [rank for rank in facts.ranks if rank.refused_commit and not rank.alive]
    whose = [f"rank {rank.rank} from commit {rank.refused_commit}" for rank in refused]
    return f"{reason} (with what others hold {', '.join(whose)} could not go on)" if whose else reason


def _from_snapshots(facts: Facts, obstacle: _Obstacle) -> Plan:
    """The newest cut at which every rank has a snapshot, or that it reaches by itself; else `GIVE_UP`.

    Snapshots in which a server found damage are tried again only where nothing else is left.
    """
    found = _reload(facts, obstacle.reason, refused=False) or _reload(facts, obstacle.reason, refused=True)
    if found is not None:
        return found
    if facts.fault.trusted:  # wrong numbers end no training
        return plan(replace(facts, fault=replace(facts.fault, trusted={})))
    reason = "; ".join(filter(None, [obstacle.reason, facts.storage_problem]))
    return _give_up(facts, reason, obstacle.culprits)


def _from_storage(facts: Facts) -> Plan | None:
    """All ranks from storage, whatever else there is."""
    only_stored = [
        replace(rank, alive=False, snapshots=(), log_complete_from_start=False) for rank in facts.ranks
    ]
    return _reload(replace(facts, ranks=tuple(only_stored)), "a restore from storage is rehearsed", False)


def _reload(facts: Facts, reason: str, refused: bool) -> Plan | None:
    """With snapshots, in host memory rather than on storage; with `refused` ones only if told so."""
    choices: dict[int, list[CommitFacts]] = {}
    rewindable: dict[int, set[Place]] = {}
    in_memory: dict[int, set[Place]] = {}
    for rank in facts.ranks:
        by_itself = _reachable(rank, facts)[0] if rank.stays else []
        beginning = [BEGINNING] if rank.log_complete_from_start else []
        trusted = facts.fault.trusted.get(rank.rank)
        newest = rank.newest.number if trusted is None else trusted
        # A restore that failed leaves no commits behind.
        stored = [c for c in rank.stored if trusted is None or rank.until(trusted, c)]
        snapshots = [
            commit for commit in rank.snapshots
            if rank.until(newest, commit) and (refused or commit.place not in rank.refused_snapshots)
        ]  # fmt: skip
        choices[rank.rank] = in_order(beginning, stored, snapshots, by_itself)
        rewindable[rank.rank] = {commit.place for commit in by_itself}
        in_memory[rank.rank] = {BEGINNING.place, *(commit.place for commit in snapshots)}
    cut = CutSearch(facts.ranks, choices).newest()
    if cut is None:
        return None
    actions: list[Rewind | Reload] = []
    for rank in facts.ranks:
        commit = cut[rank.rank]
        if commit.place in rewindable[rank.rank]:
            actions.append(Rewind(rank.rank, commit.number))
            continue
        on_storage = commit.place not in in_memory[rank.rank]
        fresh = not rank.stays or on_storage
        actions.append(Reload(rank.rank, commit.number, fresh, on_storage))
    from_storage = {action.rank for action in actions if isinstance(action, Reload) and action.stored}
    where = placed({rank: (commit.number, rank in from_storage) for rank, commit in cut.items()}, _said)
    name = PlanName.RESTORE_STORED_REPLAY if from_storage else PlanName.RESTORE_SNAPSHOT_REPLAY
    return Plan(name, f"{reason}; newest consistent snapshots: {where}", tuple(actions), cut)


def _said(place: tuple[int, bool]) -> str:
    number, on_storage = place
    return f"at commit {number} on storage" if on_storage else f"at commit {number}"


@without_collector()
def consistent_floor(ranks: Sequence[RankFacts]) -> dict[int, int]:
    """Per rank the commit below which nothing will be asked for: the newest cut that every rank completed.

    A rank whose commits stay incomplete (state neither shadowed nor replicated) holds the floor back for
    `COMPLETE_WITHIN` commits only: after that, a reduced guarantee is better than a full log.  Ranks without
    pre-images in the optimizer step keep what is needed to roll a peer, or them, through the newest one.
    """
    kept = {rank.rank: _releasable(rank) for rank in ranks}
    complete = {
        rank: [commit for commit in commits if commit.number == 0 or commit.complete]
        for rank, commits in kept.items()
    }
    communicators = Communicators(ranks)
    newest = CutSearch(ranks, kept, communicators).newest()
    if newest is None:
        return {}
    cut = CutSearch(ranks, complete, communicators).newest() if complete != kept else newest
    if cut is None or any(newest[rank].number - cut[rank].number > COMPLETE_WITHIN for rank in cut):
        cut = newest
    return {rank: commit.number for rank, commit in cut.items()}


def _releasable(rank: RankFacts) -> list[CommitFacts]:
    """Commits that the floor may rise to."""
    kept = kept_commits(rank)
    bound = floor_for_roll_forward(rank.commits)
    return kept if bound is None else [commit for commit in kept if commit.number <= bound]


def _reachable(rank: RankFacts, facts: Facts) -> tuple[list[CommitFacts], str]:
    """Commits this rank can go back to, oldest first, or a sentence why there are none."""
    trusted = facts.fault.trusted
    kept = kept_commits(rank)
    if rank.rank in trusted:
        kept = [commit for commit in kept if commit.number <= trusted[rank.rank]]
    if (rank.snapshots or rank.stored) and kept and kept[0] is BEGINNING:
        del kept[0]  # snapshots are nearer
    if rank.restores_from_image:
        return [], f"the host of rank {rank.rank} is lost, and its worker comes back from a CPU image"
    if not rank.alive:
        rebuildable = [
            commit
            for commit in kept
            if commit.number == 0 or (commit.complete and commit.has_manifest and not rank.refuses(commit))
        ]
        if rebuildable:
            return rebuildable, ""
        if rank.refused_commit:
            why = f"could not go on from commit {rank.refused_commit} with what others have of its state"
            return [], f"rank {rank.rank} {why}, and no older one was saved completely"
        if len(facts.ranks) == 1:
            return [], (
                f"the device server of rank {rank.rank} died, no other rank holds its state, "
                "and the start of its log has been released"
            )
        return (
            [],
            f"the device server of rank {rank.rank} died before any of its commits was saved completely",
        )
    if not rank.protected:
        return [], f"rank {rank.rank} keeps no pre-images, as it is alone"
    known = {snapshot.place for snapshot in rank.snapshots} if rank.snapshots else ()
    kept = [commit for commit in kept if commit.has_manifest or commit.number == 0 or commit.place in known]
    if rank.optimizer_preimages:
        return kept, "" if kept else f"rank {rank.rank} keeps no commit that it could go back to"
    if rank.phase is Phase.OPTIMIZER:
        return [], f"rank {rank.rank} stood inside its optimizer step, where its driver keeps no pre-images"
    newest = [commit for commit in kept if commit.number == rank.newest.number]
    return newest, "" if newest else f"rank {rank.rank} keeps no commit that it could go back to"


def _no_device(facts: Facts) -> str:
    who = named(facts.homeless)
    free = f"only {facts.free_devices} are free" if facts.free_devices else "no other is free"
    why = f" ({facts.fault.message})" if facts.fault.message else ""
    return f"the device of rank {who} is gone{why}, and {free}: start proxyd with more --devices than ranks"


def _name_of_end(fault: FaultFacts) -> PlanName:
    """How a job ends if a peer's worker has ended: a collective fails of that, too; all else is a fault."""
    return PlanName.END_WITH_PEER if fault.kind in ECHOES else PlanName.GIVE_UP


def _stranded_by_departure(facts: Facts) -> str:
    """A sentence if a rank that is needed for replay has left."""
    if not facts.departed or not any(is_young(rank) or rank.communicates for rank in facts.ranks):
        return ""
    gone = named(facts.departed)
    text = f"the worker of rank {gone} has ended, so nobody can take part in its collectives again"
    return f"{text} ({facts.fault.message})" if facts.fault.message else text


def _go_back(facts: Facts, cut: Cut, restarts: Sequence[Restart]) -> Plan:
    actions: list[Action] = list(restarts)
    replaced = {restart.rank for restart in restarts}
    actions += [Rewind(rank, commit.number) for rank, commit in cut.items() if rank not in replaced]
    where = placed({rank: commit.number for rank, commit in cut.items()}, "at commit {}".format)
    if not restarts:
        template = _IN_PLACE.get(facts.fault.kind, "every device server is alive")
        cause = template.format(message=facts.fault.message)
        return Plan(PlanName.REWIND_IN_PLACE, f"{cause}; newest consistent cut: {where}", tuple(actions), cut)
    moved = [rank.rank for rank in facts.ranks if rank.rank in replaced and rank.leaving and rank.alive]
    died = [restart.rank for restart in restarts if restart.rank not in moved]
    copied = sum(copy.bytes for restart in restarts for copy in restart.copies)
    sources = sorted({copy.source for restart in restarts for copy in restart.copies})
    source = f"{copied} bytes come from rank {named(sources)}" if sources else "nothing has to be copied"
    what = _RESTARTED.get(facts.fault.kind, "died")
    rolled = named(restart.rank for restart in restarts if restart.roll_forward is not None)
    if rolled:
        what += f", rank {rolled} inside an optimizer step that the others have finished"
    who = [f"the device server of rank {named(died)} {what}"] if died else []
    if moved:
        who.append(f"the device server of rank {named(moved)} is left for one on another device")
    reason = f"{'; '.join(who)}; {source}; newest consistent cut: {where}"
    if rolled:
        name = PlanName.ROLL_FORWARD
    elif all(restart.keeps_source for restart in restarts):
        name = PlanName.STASH_RESTART_RESTORE
    else:
        name = PlanName.RESTART_COPY_REPLAY
    return Plan(name, reason, tuple(actions), cut)


_IN_PLACE = {
    FaultKind.COLLECTIVE_FAILED: "a collective failed and every device server is alive",
    FaultKind.COLLECTIVE_HUNG: "a collective hung and every device server is alive",
    FaultKind.CALL_FAILED: "a call failed for the first time and every device server is alive",
    FaultKind.SILENT_CORRUPTION: "{message}",
    FaultKind.VALIDATION: "the log is being validated",
    FaultKind.PLANNED_MOVE: "nothing is broken",
}
_RESTARTED = {
    FaultKind.SERVER_STOPPED: "was stopped",
    FaultKind.SERVER_HUNG: "hung",
    FaultKind.DEVICE_GONE: "lost its device",
    FaultKind.CALL_FAILED: "did not get past a failed call",
    FaultKind.DRIVER_SUSPECT: "is suspect",
}


def _give_up(facts: Facts, reason: str, culprits: Sequence[int]) -> Plan:
    """Give up the culprits and who communicates with them.

    The others stand parked, with the collectives they had begun broken off: they need a plan of their own.
    """
    if facts.fault.kind in (FaultKind.CALL_FAILED, FaultKind.DRIVER_SUSPECT) and (
        facts.fault.message not in reason
    ):
        reason = f"{facts.fault.message}; it could not be recovered from: {reason}"
    lost = connected(facts.ranks, culprits) & {rank.rank for rank in facts.ranks}
    if not lost:
        lost = {rank.rank for rank in facts.ranks}
    actions: list[Action] = [FailRank(rank.rank, reason) for rank in facts.ranks if rank.rank in lost]
    others = tuple(rank for rank in facts.ranks if rank.rank not in lost)
    cut: Cut = {}
    if others:
        fault = FaultFacts(FaultKind.COLLECTIVE_FAILED, ())
        homeless = tuple(rank for rank in facts.homeless if rank not in lost)
        theirs = plan(replace(facts, ranks=others, fault=fault, homeless=homeless))
        actions += theirs.actions
        cut = theirs.cut
    return Plan(PlanName.GIVE_UP, reason, tuple(actions), cut)
