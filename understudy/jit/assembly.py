"""Which step a job resumes from, and which replica of each shard: decided from facts alone (paper 001 §3.3).

What counts together is what one attempt saved behind one step. A shard of another step is never put beside
it; nor is one of another attempt, which may have come to the same step with other bits. Such a group is
complete when it has every shard that the attempt's ranks announced. The newest complete group is taken, of
equal steps that of the newest attempt.

Any replica of a shard will do. Where replicas differ, what most ranks have saved goes first; of equally many,
what the lowest rank has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .digest import FileDigest
from .identity import shown

_NAMED = 8
"""Shards or ranks that a sentence names before it counts the rest."""


@dataclass(frozen=True)
class Save:
    """One rank's save of its shard, by its metadata."""

    name: str
    job: str
    attempt: str
    step: int
    shard: str
    rank: int
    world_size: int
    host: str
    reason: str
    periodic: bool
    """Written by the script in its own time and place, not just in time."""
    root: Path
    payload: str
    files: Mapping[str, FileDigest]
    digest: str
    metadata: Mapping[str, Any]

    @property
    def path(self) -> Path:
        """Of the payload."""
        return self.root / self.payload


@dataclass(frozen=True)
class Attempt:
    """One start of the job, the how-manieth of its directory, and what its ranks have announced."""

    number: int
    name: str
    world_size: int
    shards: Mapping[int, str]
    """By rank."""
    hosts: Mapping[int, str]

    @property
    def whole(self) -> bool:
        """Whether every rank has announced its shard, so that all shards are known."""
        return 0 < self.world_size == len(self.shards)

    @property
    def world(self) -> frozenset[str]:
        """All shards that have been announced."""
        return frozenset(self.shards.values())


@dataclass(frozen=True)
class Candidate:
    """A step that all shards have. `replicas`: of each shard, in the order in which they are to be tried."""

    step: int
    attempt: int
    replicas: Mapping[str, Sequence[Save]]
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What can be resumed from, best first, and why newer saves are passed over, a sentence each by step."""

    candidates: tuple[Candidate, ...]
    passed_over: tuple[tuple[int, str], ...]


def assemble(saves: Iterable[Save], attempts: Iterable[Attempt], present: Attempt | None = None) -> Outcome:
    """`saves`: those with whole metadata. `present`: the attempt that resumes, if it has been announced.

    Its shards must be those of the step: all of them if all its ranks have announced, else some.
    """
    by_name = {attempt.name: attempt for attempt in attempts if attempt.world_size}
    groups: dict[tuple[int, int, str], list[Save]] = defaultdict(list)
    for save in saves:
        number = by_name[save.attempt].number if save.attempt in by_name else -1
        groups[save.step, number, save.attempt].append(save)
    candidates, passed_over = [], []
    for (step, number, name), members in sorted(groups.items(), reverse=True):
        if complaint := _complaint(step, members, _known(by_name.get(name), members), present):
            passed_over.append((step, complaint))
        else:
            candidates.append(_candidate(step, number, members))
    return Outcome(tuple(candidates), tuple(passed_over))


def lacking(step: int, saves: Iterable[Save], attempt: Attempt) -> list[str]:
    """The announced shards that no rank of the attempt has saved at a step."""
    have = {save.shard for save in saves if save.step == step and save.attempt == attempt.name}
    return sorted(attempt.world - have)


def absent(step: int, attempt: Attempt, arrivals: Mapping[int, int]) -> dict[int, str]:
    """Hosts by rank of those that did not arrive at a save.

    A rank one step behind has arrived: it was the first to hang (paper 001 §3.3, minibatch i or i + 1).
    """
    ranks = range(attempt.world_size)
    return {rank: attempt.hosts.get(rank, "") for rank in ranks if arrivals.get(rank, -2) < step - 1}


def in_order(replicas: Iterable[Save]) -> tuple[list[Save], str | None]:
    """Replicas of one shard in the order in which to try them; a sentence if they differ.

    Just-in-time saves come before periodic checkpoints of the same step, which may hold other things, and are
    not compared with them.
    """
    ordered: list[Save] = []
    remark = None
    for periodic in (False, True):
        alike: dict[str, list[Save]] = defaultdict(list)
        for save in sorted(replicas, key=lambda one: (one.rank, one.name)):
            if save.periodic == periodic:
                alike[save.digest].append(save)
        ranked = sorted(alike.values(), key=lambda saves: (-len(_ranks(saves)), saves[0].rank))
        if len(ranked) > 1:
            remark = remark or _difference([_ranks(saves) for saves in ranked])
        ordered += [save for saves in ranked for save in saves]
    return ordered, remark


def listed(names: Iterable[object]) -> str:
    """For people: the first few, and how many more."""
    texts = [shown(str(name)) for name in names]
    rest = len(texts) - _NAMED
    return ", ".join(texts[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _known(attempt: Attempt | None, saves: Sequence[Save]) -> Attempt:
    """An attempt with what its saves say of their own ranks, where the announcement is lost or damaged."""
    attempt = attempt or Attempt(-1, saves[0].attempt, saves[0].world_size, {}, {})
    by_saves = {save.rank: save.shard for save in saves if save.world_size == attempt.world_size}
    return replace(attempt, shards={**by_saves, **attempt.shards})


def _complaint(step: int, saves: Sequence[Save], attempt: Attempt, present: Attempt | None) -> str | None:
    """Why a group cannot be resumed from, as a sentence."""
    which = f"Step {step} of attempt {shown(saves[0].attempt)}"
    have = {save.shard for save in saves}
    if not attempt.whole:
        known = f"{len(attempt.shards)} of {attempt.world_size} ranks"
        return f"{which} is passed over: only {known} announced their shards, so more may be missing."
    if lacks := sorted(attempt.world - have):
        return f"{which} is passed over: nobody has saved the shards {listed(lacks)}."
    if present is None:
        return None
    if strange := sorted(present.world - attempt.world):
        return f"{which} is passed over: it has not the shards {listed(strange)}, which are needed now."
    if present.whole and (unused := sorted(attempt.world - present.world)):
        return (
            f"{which} is passed over: its shards {listed(unused)} would be taken by no rank of this attempt."
        )
    return None


def _candidate(step: int, number: int, saves: Iterable[Save]) -> Candidate:
    shards: dict[str, list[Save]] = defaultdict(list)
    for save in saves:
        shards[save.shard].append(save)
    replicas, remarks = {}, []
    for shard in sorted(shards):
        replicas[shard], remark = in_order(shards[shard])
        if remark:
            remarks.append(f"Step {step}, shard {shown(shard)}: {remark}")
    return Candidate(step, number, replicas, tuple(remarks))


def _ranks(saves: Iterable[Save]) -> list[int]:
    """Each votes once."""
    return sorted({save.rank for save in saves})


def _difference(ranked: Sequence[Sequence[int]]) -> str:
    """`ranked`: the ranks that have saved the same, as a sentence."""
    first, second = ranked[0], ranked[1]
    groups = " against ".join(f"ranks {listed(ranks)}" for ranks in ranked[:_NAMED])
    taken = (
        f"equally many, so that of the lowest rank, {min(first)}, is taken"
        if len(first) == len(second)
        else "the majority is taken"
    )
    return f"its replicas differ, {groups}; {taken}."
