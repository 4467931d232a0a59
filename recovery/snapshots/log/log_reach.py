"""How far a stored log leads behind a stored set, and its records on their way back into a log."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from understudy import replay
from understudy.recovery.host.evidence import facts_of
from understudy.recovery.planning.cuts import CutSearch
from understudy.recovery.planning.facts import RankFacts
from understudy.recovery.snapshots.log.stored_log import (
    LARGEST_DICTIONARY,
    About,
    BadLog,
    Frame,
    Kind,
    StoredCommit,
    ends_step,
    read_about,
    read_commit,
    read_frames,
)
from understudy.recovery.snapshots.restore.reading import Damaged, SetReader, StoreError
from understudy.recovery.snapshots.stores.catalogue import StoredSet, read_run
from understudy.recovery.snapshots.stores.layout import LogFile, logs_of
from understudy.recovery.snapshots.writing.described_changes import BadChanges, Descriptions

MOST_SEGMENTS = 4096
"""Of a log (replay/csrc/log/log_format.h: kMaxSegments)."""


@dataclass(frozen=True)
class Goal:
    """A commit at which a rank's stored log ends a step."""

    commit: replay.Commit
    described: bool


@dataclass
class RankReach:
    """One rank's stored log behind a set.  `notes`: what is not whole, a sentence each."""

    rank: int
    start: replay.Commit
    """Of the set."""
    about: About | None = None
    files: list[LogFile] = field(default_factory=list)
    end: int = 0
    """Log offset of the last commit that is whole."""
    templates: tuple[int, int] = (0, 0)
    """Ids from and to."""
    goals: dict[int, Goal] = field(default_factory=dict)
    """By step."""
    notes: list[str] = field(default_factory=list)

    def described(self) -> bool:
        """Whether the worker ever said what its buffers are called."""
        return any(goal.described for goal in self.goals.values())


@dataclass(frozen=True)
class Reach:
    """A set, and the newest step to which all ranks' logs lead from it; that of the set if no further."""

    stored: StoredSet
    step: int
    ranks: Mapping[int, RankReach]

    @property
    def notes(self) -> list[str]:
        """What is not whole."""
        return [note for _, rank in sorted(self.ranks.items()) for note in rank.notes]


def newest_reach(run: Path) -> Reach | None:
    """From the newest complete set of a run; None if there is none.

    Raises OSError, StoreError or Damaged.
    """
    for stored in read_run(run).sets:
        if stored.complete:
            return reach_of(run, stored)
    return None


def reach_of(run: Path, stored: StoredSet) -> Reach:
    """Reads all of the log behind that set; raises OSError, StoreError or Damaged."""
    files = logs_of(run)
    ranks: dict[int, RankReach] = {}
    with SetReader(stored) as reader:
        for rank, part in reader.parts.items():
            start = _commit_of(part.tables()[0])
            ranks[rank] = _read_rank(rank, start, [one for one in files if one.rank == rank])
    return Reach(stored, _newest_common(stored, ranks), ranks)


def _commit_of(row: bytes) -> replay.Commit:
    try:
        return replay.describe_row(row)
    except replay.LogError as problem:
        raise Damaged(str(problem)) from problem


def _read_rank(rank: int, start: replay.Commit, files: Sequence[LogFile]) -> RankReach:
    found = RankReach(rank, start, end=start.log_offset)
    first = max((index for index, one in enumerate(files) if one.begin <= start.log_offset), default=None)
    if first is None:
        return found
    position = files[first].begin
    for one in files[first:]:
        if one.begin != position:
            break
        try:
            position = _read_file(found, one)
        except (BadLog, StoreError) as problem:
            found.notes.append(f"{one.path}: {problem}")
            break
        if position == one.begin:
            break
        found.files.append(one)
    return found


def _read_file(found: RankReach, one: LogFile) -> int:
    """The log offset of its last commit; raises OSError or BadLog."""
    end = one.begin
    described: set[int] = set()
    with open(one.path, "rb") as file:
        size, whole = os.fstat(file.fileno()).st_size, 0
        for frame in read_frames(file, size):
            whole = frame.end
            if frame.kind is Kind.ABOUT:
                _check_about(found, one, frame)
            elif found.about is None:
                raise BadLog("its first frame is missing")
            elif frame.kind is Kind.TEMPLATES:
                begin, until = found.templates
                last = frame.number + len(frame.content)
                found.templates = (min(begin, frame.number) if until else frame.number, max(until, last))
            elif frame.kind is Kind.DESCRIPTION:
                described.add(frame.number)
            elif frame.kind is Kind.COMMIT:
                commit = read_commit(frame.content).commit
                if commit.log_offset != frame.number or commit.log_offset < end:
                    raise BadLog("its commits are out of order")
                end = commit.log_offset
                found.end = max(found.end, end)
                if ends_step(commit) and end > found.start.log_offset:
                    found.goals[commit.step] = Goal(commit, commit.step in described)
        if whole < size:
            found.notes.append(
                f"{one.path}: what follows byte {whole} of {size} is not whole and does not count"
            )
    return end


def _check_about(found: RankReach, one: LogFile, frame: Frame) -> None:
    about = read_about(frame)
    if about.rank != one.rank or frame.number != one.begin:
        raise BadLog("it is the log of something else")
    if found.about is not None and about != found.about:
        raise BadLog("it does not belong to the file before")
    found.about = about


def _newest_common(stored: StoredSet, ranks: Mapping[int, RankReach]) -> int:
    """All ranks have to stand at the end of one step, as for any set, and on a consistent cut."""
    steps = set.intersection(*(set(rank.goals) for rank in ranks.values()))
    needed = [rank for rank in ranks.values() if rank.described()]
    for step in sorted(steps, reverse=True):
        if all(rank.goals[step].described for rank in needed) and _consistent(ranks, step):
            return step
    return stored.step


def _consistent(ranks: Mapping[int, RankReach], step: int) -> bool:
    facts = [
        RankFacts(rank, alive=False, commits=(facts_of(reach.start), facts_of(reach.goals[step].commit)))
        for rank, reach in ranks.items()
    ]
    return CutSearch(facts, {one.rank: one.commits[1:] for one in facts}).newest() is not None


@dataclass(frozen=True)
class Laid:
    """What lies in a fresh log now: its last commit, and what the worker said of it."""

    goal: StoredCommit
    description: bytes


def log_sizes(reach: RankReach, step: int) -> dict[str, int]:
    """Arguments of `create_log` for a log that holds the way to that step; raises BadLog."""
    about = reach.about
    if about is None:
        raise BadLog(f"there is no stored log of rank {reach.rank}")
    end = reach.goals[step].commit.log_offset
    segments = end // about.segment_bytes - reach.start.log_offset // about.segment_bytes + 2
    if segments > MOST_SEGMENTS:
        raise BadLog(f"the stored log of rank {reach.rank} is larger than a log can be: {segments} segments")
    begin, until = reach.templates
    if until - begin > LARGEST_DICTIONARY:
        raise BadLog(f"the stored templates of rank {reach.rank} make no sense")
    # Ids that lie a dictionary's size apart would share a place; a multiple of it keeps regions whole.
    times = (until - begin) // about.dictionary_bytes + 2
    return {
        "segment_bytes": about.segment_bytes, "segment_count": segments,
        "dictionary_bytes": times * about.dictionary_bytes,
    }  # fmt: skip


def lay_out(reach: RankReach, step: int, log: replay.Log) -> Laid:
    """The records from the set to that step into a fresh log; raises OSError, BadLog or LogError."""
    filler = replay.LogFiller(log, reach.start.log_offset)
    descriptions, described, position = Descriptions(), 0, reach.start.log_offset
    for frame in _frames(reach.files):
        if frame.kind is Kind.TEMPLATES:
            filler.put_templates(frame.number, frame.content)
        elif frame.kind is Kind.RECORDS and frame.number + len(frame.content) > position:
            if frame.number > position:
                raise BadLog(f"records of rank {reach.rank} are missing")
            filler.put_records(frame.content[position - frame.number :])
            position = frame.number + len(frame.content)
        elif frame.kind is Kind.ABOUT:
            descriptions = Descriptions()
        elif frame.kind is Kind.DESCRIPTION:
            try:
                descriptions.decode(frame.content)
                described = frame.number
            except BadChanges as problem:
                raise BadLog(str(problem)) from problem
        elif frame.kind is Kind.COMMIT:
            found = read_commit(frame.content)
            if found.commit.step == step and ends_step(found.commit) and frame.number == position:
                filler.finish(list(found.frees), found.commit.record_index)
                return Laid(found, descriptions.last if described == step else b"")
    raise BadLog(f"step {step} of rank {reach.rank} is not there any more")


def _frames(files: Sequence[LogFile]) -> Iterator[Frame]:
    for one in files:
        with open(one.path, "rb") as file:
            yield from read_frames(file, os.fstat(file.fileno()).st_size)
