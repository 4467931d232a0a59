"""Facts for the planner, read from the logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import replay
from recovery.facts import BufferFacts, CommitFacts, Manifest, RankFacts
from recovery.jobs import Session


class LogManifests(Mapping[int, Manifest]):
    """Manifests of a log's commits, read when asked for."""

    def __init__(self, log: replay.Log) -> None:
        self._log = log
        self._read: dict[int, Manifest] = {}

    def __getitem__(self, commit: int) -> Manifest:
        if commit not in self._read:
            try:
                self._read[commit] = tuple(
                    BufferFacts(buffer.handle, buffer.bytes, buffer.digest, buffer.shadowed)
                    for buffer in self._log.manifest(commit)
                )
            except replay.LogError as problem:
                raise KeyError(f"manifest of commit {commit}: {problem}") from problem
        return self._read[commit]

    def __iter__(self) -> Iterator[int]:
        return iter(commit.number for commit in self._log.commits() if commit.has_manifest)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def commit_facts(log: replay.Log) -> tuple[CommitFacts, ...]:
    """All commits still in the ring, oldest first."""
    return tuple(
        CommitFacts(
            number=commit.number,
            step=commit.step,
            complete=commit.complete,
            has_manifest=commit.has_manifest,
            communicators=tuple(commit.communicators),
        )
        for commit in log.commits()
    )


def rank_facts(
    session: Session, optimizer_preimages: bool, commits: Sequence[CommitFacts] | None = None
) -> RankFacts:
    """What is known of one rank now."""
    log = session.log
    alive = session.server.process.running and not session.hollow
    return RankFacts(
        rank=session.rank,
        generation=session.generation,
        alive=alive,
        commits=commit_facts(log) if commits is None else tuple(commits),
        log_complete_from_start=log.freed_segments == 0,
        manifests=LogManifests(log),
        floor_commit=max(log.floor_commit, session.restored_commit if alive else 0),
        phase=session.phase,
        optimizer_preimages=optimizer_preimages,
    )
