"""Facts for the planner, read from the logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

from understudy import replay
from understudy.recovery.planning.communicators import connected
from understudy.recovery.planning.facts import BEGINNING, BufferFacts, CommitFacts, Manifest, RankFacts, Uid
from understudy.recovery.state.jobs import Job, Session

KEPT_COMMITS = replay.COMMIT_RING - 4
"""Commits behind the newest for which a server keeps anything at all, wherever the floor is."""

UNREAD_TRIES = 2
"""How often a server tries to read the state of a rank before its own is had in another way."""


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


_facts_by_row: WeakKeyDictionary[replay.Log, dict[bytes, CommitFacts]] = WeakKeyDictionary()
"""What each row of a log's ring said: a row is read anew with each look, and understood once."""


def commit_facts(log: replay.Log) -> tuple[CommitFacts, ...]:
    """All commits still in the ring, oldest first."""
    known = _facts_by_row.get(log, {})
    # A number may come again after a rewind, with another content: only equal rows are the same commit.
    kept: dict[bytes, CommitFacts] = {}
    before = BEGINNING
    for row in log.commit_rows():
        before = kept[row] = known.get(row) or facts_of(log.commit_of(row), before)
    _facts_by_row[log] = kept
    return tuple(kept.values())


def snapshot_facts(log: replay.Log) -> tuple[CommitFacts, ...]:
    """Commits whose snapshots may be asked for, by number: of two with one a server brings the newer back."""
    found = {one.commit.number: one.commit for one in log.snapshots() if one.serial >= log.snapshot_floor}
    return tuple(facts_of(found[number]) for number in sorted(found))


def durable_facts(session: Session) -> tuple[CommitFacts, ...]:
    """Commits whose state lies on storage, and to which the log reaches back, oldest first."""
    if not session.durable or session.host:  # it has moved since: its memory is not to be had here
        return ()
    kept_from = session.log.freed_segments * session.log.segment_bytes
    return tuple(one.commit for one in session.durable if one.log_offset >= kept_from)


def facts_of(commit: replay.Commit, before: CommitFacts = BEGINNING) -> CommitFacts:
    """What a commit of a log says.

    It has the tuples of the one before it where these are equal: a rank's communicators stay, as a rule.
    """
    communicators, members = commit.communicators, tuple(commit.members)
    uids = tuple([(low, high) for low, high, _ in communicators])
    if (uids, members) == (before.uids, before.members):
        uids, members = before.uids, before.members
    return CommitFacts(
        number=commit.number,
        step=commit.step,
        complete=commit.complete,
        has_manifest=commit.has_manifest,
        uids=uids,
        sequences=tuple([sequence for *_, sequence in communicators]),
        members=members,
        optimizer=commit.optimizer,
        call=commit.call,
        step_digest=commit.step_digest,
        index=commit.record_index,
    )


def _refused_commits(session: Session) -> frozenset[tuple[int, int]]:
    refused = session.refused_snapshots
    if not refused:
        return frozenset()
    return frozenset(
        facts_of(kept.commit).place for kept in session.log.snapshots() if kept.serial in refused
    )


def refuse_snapshots_behind(number: int, rank: RankFacts, session: Session) -> None:
    """Those of a rank that are later than a commit: its state was corrupted there."""
    corrupted = {one.place for one in rank.snapshots if not rank.until(number, one)}
    session.refused_snapshots |= {
        kept.serial for kept in session.log.snapshots() if facts_of(kept.commit).place in corrupted
    }


def _without_shadows_before(restored: int, commits: tuple[CommitFacts, ...]) -> tuple[CommitFacts, ...]:
    """What shadows of its predecessors held, a server overwrites; their manifests may still look whole."""
    return tuple(replace(c, has_manifest=False) if c.number < restored else c for c in commits)


def rank_facts(
    session: Session, optimizer_preimages: bool, commits: Sequence[CommitFacts] | None = None
) -> RankFacts:
    """What is known of one rank now."""
    log = session.log
    if session.restores_from_image:
        return _facts_from_image(session, optimizer_preimages)
    alive = session.has_state
    known = commit_facts(log) if commits is None else tuple(commits)
    return RankFacts(
        rank=session.rank,
        generation=session.generation,
        alive=alive,
        commits=_without_shadows_before(session.resumed_commit, known),
        log_complete_from_start=log.freed_segments == 0,
        manifests=LogManifests(log),
        floor_commit=max(
            log.floor_commit, session.restored_commit if alive else 0, log.commit_count - KEPT_COMMITS
        ),
        phase=session.phase,
        optimizer_preimages=optimizer_preimages and not log.final_steps and not log.sealed,
        suspect=session.server.suspect,
        leaving=session.destination is not None or bool(session.destination_host),
        snapshots=snapshot_facts(log),
        refused_snapshots=_refused_commits(session),
        stored=durable_facts(session),
        protected=session.world > 1,
        refused_commit=session.refused_commit,
        unread=frozenset(rank for rank, times in session.unread.items() if times >= UNREAD_TRIES),
        begun=_begun(log, known[-1:]),
        host=session.host,
        sealed=bool(log.sealed) and session.server.process.running,
    )


def _begun(log: replay.Log, newest: tuple[CommitFacts, ...]) -> tuple[tuple[Uid, int], ...]:
    """Communicators that no commit tells of yet."""
    told = {uid for commit in newest for uid in commit.uids}
    return tuple(((low, high), size) for low, high, _, size in log.started() if (low, high) not in told)


def _facts_from_image(session: Session, optimizer_preimages: bool) -> RankFacts:
    """Facts of a rank whose worker comes back from an image.

    Of its log the snapshot counts that goes with the image.  The rest is of another moment, or was lost with
    the host.
    """
    log = session.log
    found = [facts_of(kept.commit) for kept in log.snapshots() if kept.serial == session.restores_from_image]
    kept = tuple(replace(commit, complete=False, has_manifest=False) for commit in found)
    return RankFacts(
        rank=session.rank,
        generation=session.generation,
        alive=False,
        commits=kept,
        log_complete_from_start=log.freed_segments == 0,
        floor_commit=max((commit.number for commit in kept), default=0),
        optimizer_preimages=optimizer_preimages,
        snapshots=tuple(found),
        refused_snapshots=_refused_commits(session),
        protected=session.world > 1,
        restores_from_image=True,
    )


def concerned(
    job: Job, faulted: Sequence[int], optimizer_preimages: bool
) -> tuple[list[Session], tuple[int, ...]]:
    """Sessions that must go back together because of a fault, and which of the ranks they need have left.

    Who shares no communicator with them is not disturbed: to be parked breaks the collectives under way.
    """
    here = {session.rank: session for session in job.active_sessions()}
    gone = dict(job.last_facts)
    for session in job.sessions.values():
        if session.rank not in here:  # its program has ended, and its worker is about to
            gone[session.rank] = rank_facts(session, optimizer_preimages)
    begun = [rank for rank, s in here.items() if s.state == "recovering" or not s.has_state]
    known = [rank_facts(session, optimizer_preimages) for session in here.values()]
    ranks = connected([*known, *gone.values()], [*faulted, *begun])
    # Of some that have ended nobody knows any more which communicators they had: it may be any.
    left = (ranks & gone.keys()) | (job.departed.keys() - gone.keys())
    return [here[rank] for rank in sorted(ranks & here.keys())], tuple(sorted(left))
