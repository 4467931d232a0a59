"""Takes what the job resumes from: the shell around `assembly`, which reads payloads and asks again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from . import reading
from .assembly import Attempt, Candidate, Save, assemble, lacking, listed
from .identity import Identity, JitError, shown
from .reading import Directory, NotWhole

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two looks of `wait_for_shards`."""


@dataclass(frozen=True)
class Choice:
    """What the job resumes from: the same step for all shards."""

    step: int
    path: Path
    """The payload for the shard of whoever chose; for one who has none, that of the first shard."""
    metadata: Mapping[str, Any]
    """Of the save, or the snapshot.json of an export."""
    remarks: tuple[str, ...] = ()
    """What was passed over, and where replicas differ: a sentence each."""
    paths: Mapping[str, Path] = field(default_factory=dict)
    """The payload of each shard, so that one rank may choose for all. Empty for an export."""
    of_each_rank: Path | None = None
    """The folder of an export that has a folder `rank-R` for each rank."""

    def for_rank(self, who: Identity) -> Path:
        """The payload that another rank takes. Raises JitError where there is none for its shard."""
        if self.of_each_rank is not None:
            return self.of_each_rank / f"rank-{who.rank}"
        if not self.paths:
            return self.path
        if who.shard not in self.paths:
            raise JitError(
                f"Step {self.step} has no shard {shown(who.shard)}, only {listed(self.paths)}; "
                "name the shards as they were named when it was saved."
            )
        return self.paths[who.shard]


@dataclass(frozen=True)
class Judgement:
    """What was found in a directory. `damaged`: why a save's payload or metadata is wrong, by its name."""

    choice: Choice | None
    replicas: Mapping[str, Save]
    """What was taken, by shard."""
    remarks: tuple[str, ...]
    damaged: Mapping[str, str]


def judge(
    directory: Directory,
    present: Attempt | None = None,
    only: Attempt | None = None,
    shard: str | None = None,
    verify: Callable[[Iterable[Save]], dict[str, str]] | None = None,
) -> Judgement:
    """The newest complete step whose payloads are what was saved: one replica of each shard is read.

    `present`: the attempt that resumes. `only`: look at the just-in-time saves of this attempt alone.
    `verify`: says which payloads are damaged, and why; if not given, they are read.
    Raises JitError where the directory cannot be read.
    """
    try:
        saves, damaged = directory.saves()
        saves, damaged = own_job(directory, saves, damaged)
    except (OSError, NotWhole) as error:
        raise JitError(f"The directory {directory.path} cannot be read: {error}") from error
    if only is not None:
        saves = [save for save in saves if save.attempt == only.name and not save.periodic]
    outcome = assemble(saves, directory.attempts() if only is None else [only], present)
    remarks = [(step_of(name), f"{name} is passed over: {why}.") for name, why in sorted(damaged.items())]
    remarks += outcome.passed_over
    for candidate in outcome.candidates:
        taken, wrong = _whole_replicas(candidate, verify or directory.verify_all)
        damaged |= wrong
        remarks += [(candidate.step, f"{name} is damaged: {why}.") for name, why in sorted(wrong.items())]
        remarks += [(candidate.step, text) for text in candidate.remarks]
        if len(taken) == len(candidate.replicas):
            return _judged(candidate.step, taken, shard, remarks, damaged)
        lost = sorted(set(candidate.replicas) - set(taken))
        text = f"Step {candidate.step} is passed over: no whole replica is left of the shards {listed(lost)}."
        remarks.append((candidate.step, text))
    return Judgement(None, {}, tuple(text for _, text in sorted(remarks, reverse=True)), damaged)


def own_job(
    directory: Directory, saves: Iterable[Save], damaged: Mapping[str, str]
) -> tuple[list[Save], dict[str, str]]:
    """The saves of the directory's job; those of others are found damaged. Raises NotWhole, OSError."""
    job, own, others = directory.job(), [], dict(damaged)
    for save in saves:
        if save.job == job:
            own.append(save)
        else:
            others[save.name] = f"it is one of the job {shown(save.job)}"
    return own, others


def step_of(name: str) -> int:
    """Of a save, by its folder's name."""
    found = reading.step_and_rank(name)
    return found[0] if found else -1


def exported(
    also: Sequence[str | os.PathLike[str]], who: Identity, owner: int
) -> tuple[Choice | None, tuple[str, ...]]:
    """The newest directory of a `recoveryctl snapshots export`, and why others are passed over."""
    found, remarks = [], []
    for path in map(Path, also):
        try:
            fields = reading.read_export(path, owner)
            if fields["one_for_all_ranks"]:
                found.append(Choice(fields["step"], path, fields))
                continue
            if fields["ranks"] != who.world_size:
                raise NotWhole(
                    f"it is for {fields['ranks']} ranks, each its own, and there are {who.world_size}"
                )
            choice = Choice(fields["step"], path, fields, of_each_rank=path)
            found.append(replace(choice, path=choice.for_rank(who)))
        except NotWhole as problem:
            remarks.append(f"The export {shown(str(path))} is passed over: {problem}.")
    return max(found, key=lambda one: one.step, default=None), tuple(remarks)


def wait_for_shards(directory: str | os.PathLike[str], timeout: float) -> Choice:
    """For launchers: return as soon as it is safe to end the job's processes, that is, when some step has all
    shards of the newest attempt, saved just in time (paper 001 §3.3: one rank of each shard suffices).

    `timeout` is in seconds. Raises JitError when it is over, naming the shards that lack. The choice's `path`
    is that of the first shard; `paths` has all.
    """
    end, pause = time.monotonic() + timeout, _FIRST_PAUSE
    reader: Directory | None = None
    while True:
        reader = reader or _reader(Path(directory))
        found: Choice | str = "there is no directory of shards yet"
        if reader is not None:
            found = _looked(reader)
        if isinstance(found, Choice):
            return found
        left = end - time.monotonic()
        if left <= 0:
            raise JitError(
                f"Within {timeout:g} s no step in {os.fspath(directory)} had all shards: {found}; what was "
                "complete before still counts."
            )
        time.sleep(min(pause, left))
        pause = min(pause * 1.5, _LONGEST_PAUSE)


def same_on_all_ranks(identity: Identity, choose: Callable[[], Choice | None]) -> Choice | None:
    """Rank 0 chooses, and tells the others. What it cannot read, no rank begins without."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or identity.world_size == 1:
        return choose()
    told: list[Any] = [None]
    if identity.rank == 0:
        try:
            told = [choose()]
        except JitError as error:
            told = [error]
    dist.broadcast_object_list(told, src=0)
    if isinstance(told[0], JitError):
        raise told[0]
    choice: Choice | None = told[0]
    return choice


def _reader(path: Path) -> Directory | None:
    try:
        return Directory(path.resolve(strict=True), os.stat(path).st_uid)
    except OSError:
        return None


def _looked(reader: Directory) -> Choice | str:
    try:
        return _look(reader)
    except (OSError, JitError) as error:
        return f"it cannot be read ({error})"


def _look(reader: Directory) -> Choice | str:
    """What can be resumed from; or what lacks, as half a sentence."""
    numbers = reader.numbers()
    if not numbers:
        return "no rank has announced itself"
    attempt = reader.attempt(numbers[-1])
    if not attempt.whole:
        return f"{len(attempt.shards)} of {attempt.world_size} ranks have announced themselves"
    names = reader.names()
    saves = [save for save in reader.saves(names)[0] if save.attempt == attempt.name and not save.periodic]
    if not saves:
        return f"nobody has saved any of the shards {listed(sorted(attempt.world))}"
    if any(not lacking(step, saves, attempt) for step in {save.step for save in saves}):
        judgement = judge(reader, only=attempt)
        return judgement.choice or " ".join(judgement.remarks).rstrip(".")
    steps = sorted({save.step for save in saves}, reverse=True)
    return "; ".join(
        f"step {step} lacks the shards {listed(lacking(step, saves, attempt))}" for step in steps[:3]
    )


def _whole_replicas(
    candidate: Candidate, verify: Callable[[Iterable[Save]], dict[str, str]]
) -> tuple[dict[str, Save], dict[str, str]]:
    """The first whole replica of each shard that has one, and why others are damaged, by name."""
    left = {shard: list(replicas) for shard, replicas in candidate.replicas.items()}
    taken: dict[str, Save] = {}
    wrong: dict[str, str] = {}
    while left:
        tried = {shard: replicas.pop(0) for shard, replicas in left.items()}
        found = verify(tried.values())
        wrong |= found
        taken |= {shard: save for shard, save in tried.items() if save.name not in found}
        left = {shard: replicas for shard, replicas in left.items() if replicas and shard not in taken}
    return taken, wrong


def _judged(
    step: int,
    taken: Mapping[str, Save],
    shard: str | None,
    remarks: Iterable[tuple[int, str]],
    damaged: Mapping[str, str],
) -> Judgement:
    save = taken[shard] if shard in taken else taken[min(taken)]  # type: ignore[index]
    said = tuple(text for at, text in sorted(remarks, reverse=True) if at >= step)
    paths = {name: one.path for name, one in taken.items()}
    return Judgement(Choice(step, save.path, save.metadata, said, paths), taken, said, damaged)
