"""Whether anything could have been reached when the planner says that nothing can: every cut is tried."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from simulation.log import SEGMENT_RECORDS, Commit
from understudy.recovery.planning.facts import Facts, Phase, RankFacts

if TYPE_CHECKING:
    from simulation.device import Device
    from simulation.world import World

LARGEST = 20_000
"""Cuts tried at most; larger cases are not judged."""

Choice = tuple[int, int]
"""(commit, record)"""


def reachable(world: World, facts: Facts) -> dict[int, int] | None:
    """A cut (rank -> commit) that these ranks could be brought to, or None.

    Judged by what the servers and logs hold, and by the programs, not by what the planner was told; the
    planner's policy is respected: nothing below a floor, no copies from a rank at another step, and none that
    cannot be checked by a digest.
    """
    choices = [_choices(world, rank) for rank in facts.ranks]
    for commits in _cuts(world, facts, choices):
        if _rebuildable(world, facts, commits):
            return commits
    by_itself = [
        {*_snapshots(world, rank), *(some if rank.alive and not rank.suspect else ())}
        for rank, some in zip(facts.ranks, choices, strict=True)
    ]
    return next(_cuts(world, facts, [sorted(some) for some in by_itself]), None)


def _cuts(world: World, facts: Facts, choices: Sequence[Sequence[Choice]]) -> Iterator[dict[int, int]]:
    """Every consistent one, if there are not too many to try."""
    if not 0 < math.prod(map(len, choices)) <= LARGEST:
        return
    for cut in itertools.product(*choices):
        positions = {rank.rank: record for rank, (_, record) in zip(facts.ranks, cut, strict=True)}
        if consistent(world, positions):
            yield {rank.rank: commit for rank, (commit, _) in zip(facts.ranks, cut, strict=True)}


def _snapshots(world: World, rank: RankFacts) -> list[Choice]:
    """What a new server reaches without anybody's help: snapshots, and the beginning of a whole log."""
    log = world.logs[rank.rank]
    kept = [one.commit for one in log.published if one.serial >= log.snapshot_floor]
    needed = [commit for commit in kept if commit.number <= log.commit_count]
    if world.storage is not None:
        durable = world.job.sessions[rank.rank].durable
        parts = [world.storage.part(rank.rank, one.serial) for one in durable]
        needed += [part.commit for part in parts if part is not None]
    beginning = [(0, 0)] if log.freed_segments == 0 else []
    return beginning + [
        (commit.number, commit.index)
        for commit in needed
        if commit.index >= log.freed_segments * SEGMENT_RECORDS
    ]


def consistent(world: World, positions: dict[int, int]) -> bool:
    """Whether everybody has done as many collectives and messages as its peers.

    A communicator that some have given up and others have not is no cut either, even if it was never used:
    logs do not keep how often it was, and it could not be rebuilt.  Nor is one that some have used and others
    have not: members connect all together, when it is first used or when it is rebuilt.
    """
    seen: dict[tuple[object, ...], int] = {}
    for rank, position in positions.items():
        program = world.programs[rank]
        states = {key: program.done(key, position) for key in program.marks}
        states |= {("used", number): int(record < position) for number, record in program.first_uses.items()}
        states |= {("given up", number): int(record < position) for number, record in program.leaves.items()}
        if any(seen.setdefault(key, state) != state for key, state in states.items()):
            return False
    return True


def _choices(world: World, rank: RankFacts) -> list[Choice]:
    session = world.job.sessions[rank.rank]
    log = world.logs[rank.rank]
    device: Device = world.device_of(session)
    found: list[Choice] = []
    if log.freed_segments == 0 and log.floor_commit == 0 and (not rank.alive or device.table.oldest == 0):
        found.append((0, 0))
    for commit in log.commits():
        if commit.number < log.floor_commit or commit.index < log.freed_segments * SEGMENT_RECORDS:
            continue
        if rank.alive:
            if device.table.oldest <= commit.number <= device.table.epoch:
                found.append((commit.number, commit.index))
        elif commit.number < session.resumed_commit:
            continue  # a server that was told to run on may have done so, even if it died first
        elif commit.complete and commit.has_manifest and commit.readable:
            found.append((commit.number, commit.index))
    if rank.alive and not rank.optimizer_preimages:
        if rank.phase is Phase.OPTIMIZER:
            return []
        return [choice for choice in found if choice[0] == log.commit_count]
    return found


def _rebuildable(world: World, facts: Facts, cut: dict[int, int]) -> bool:
    for rank in facts.ranks:
        if (rank.alive and not rank.suspect) or cut[rank.rank] == 0:
            continue
        commit = world.logs[rank.rank].entry(cut[rank.rank])
        mine = {row.digest for row in commit.rows if row.digest is not None}
        held = mine if rank.alive else _held(world, facts, cut, commit)
        if any(not row.shadowed and row.digest not in held for row in commit.rows):
            return False
    return True


def _held(world: World, facts: Facts, cut: dict[int, int], wanted: Commit) -> set[int | None]:
    held: set[int | None] = set()
    for other in facts.ranks:
        if other.alive and cut[other.rank]:
            commit = world.logs[other.rank].entry(cut[other.rank])
            if commit.step == wanted.step and commit.has_manifest:
                held |= {row.digest for row in commit.rows if row.digest is not None}
    return held
