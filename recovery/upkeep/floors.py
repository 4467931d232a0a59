"""Lets go of log and pre-images that no recovery can need, and of shadows that replicas make superfluous."""

from __future__ import annotations

import asyncio
import math

import structlog

from understudy import replay
from understudy.protos import control_pb2 as pb
from understudy.recovery.agent_api.commands import NotDone
from understudy.recovery.base.background import Complaints
from understudy.recovery.base.timing import TIMING, Timing
from understudy.recovery.host.evidence import LogManifests, commit_facts, rank_facts
from understudy.recovery.job.coordinator import Coordinator
from understudy.recovery.planning.facts import CommitFacts
from understudy.recovery.planning.planner import consistent_floor
from understudy.recovery.planning.replicas import Group, Points, ReplicaGroups, ReplicaTracker
from understudy.recovery.state.jobs import Job, Session
from understudy.recovery.upkeep.validation import ValidationSchedule

log = structlog.get_logger()

REPLICA_CHECK_COMMITS = 16
EARLY_COMMITS = 8
"""The first ones are learnt from one by one: a job has made them before anybody looks twice."""


class FloorKeeper:
    """Moves the floors of one job's ranks up to their newest consistent cut."""

    def __init__(
        self,
        job: Job,
        coordinator: Coordinator,
        keeps_optimizer_preimages: bool,
        validations: ValidationSchedule,
        timing: Timing = TIMING,
    ) -> None:
        self._job, self._timing = job, timing
        self._validations = validations
        self._coordinator = coordinator
        self._keeps_optimizer_preimages = keeps_optimizer_preimages
        self._tracker = ReplicaTracker()
        self._groups = ReplicaGroups()
        self._deviated: dict[Group, int] = {}
        self._early = EARLY_COMMITS
        self._checked: int = 0
        self._next_check = 1
        self._generation = 0
        self._counts: dict[int, int] = {}
        self._commits: dict[int, tuple[CommitFacts, ...]] = {}

    async def run(self) -> None:
        """Until cancelled."""
        complaints = Complaints("floors")
        while True:
            moved = False
            if not self._coordinator.restoring and self._job.sessions:
                with complaints.survived(self._job.name):
                    try:
                        moved = await self.look()
                    except NotDone as problem:
                        log.warning("replicas not announced", job=self._job.name, problem=str(problem))
            await asyncio.sleep(self._timing.look_busy_s if moved else self._timing.look_idle_s)

    async def look(self) -> bool:
        """One look; whether anything moved."""
        sessions = [session for session in self._job.active_sessions() if session.world > 1]
        if self._generation != self._job.generation:
            self._generation = self._job.generation
            self._tracker.forget()
            self._checked, self._next_check = 0, 1
            self._commits.clear()
        self._validations.look(self._job.active_sessions())
        if not sessions or not self._read(sessions):
            return False
        if len(sessions) < sessions[0].world:
            if self._job.departed:
                self._release_all(sessions)
            return True  # a rank that has not come yet may need its peers from the beginning
        ranks = [
            rank_facts(session, self._keeps_optimizer_preimages, self._commits[session.rank])
            for session in sessions
        ]
        floors = consistent_floor(ranks)
        if not floors:
            return True  # no common cut is left, until the next one
        if self._early:
            self._learn_early(sessions, floors)
        if not self._uncorrupted(sessions, floors):
            return True
        for session in sessions:
            floor = floors[session.rank]
            if floor > session.log.floor_commit:
                session.log.floor_commit = floor
        if min(floors.values()) >= self._next_check:
            await self._announce_replicas(sessions, floors)
        return True

    def _learn_early(self, sessions: list[Session], floors: dict[int, int]) -> None:
        """From each of the first commits up to the floors."""
        commits = [
            {(commit.step, commit.call): commit.number for commit in self._commits[session.rank]
             if commit.has_manifest and session.log.floor_commit < commit.number <= floors[session.rank]}
            for session in sessions
        ]  # fmt: skip
        common = set.intersection(*(set(numbers) for numbers in commits))
        for point in sorted(common)[: self._early]:
            manifests = {
                session.rank: LogManifests(session.log).get(numbers[point], ())
                for session, numbers in zip(sessions, commits, strict=True)
            }
            self._groups.learn(manifests, dict.fromkeys(manifests, point))
            self._early -= 1

    def _uncorrupted(self, sessions: list[Session], floors: dict[int, int]) -> bool:
        """Whether replicas agree at the cut to which the floors are to move; else they stay."""
        logs = {session.rank: session.log for session in sessions}

        def digests(rank: int, handles: list[int]) -> list[int | None]:
            commit = self._commit(rank, floors[rank])
            if commit is not None and not commit.has_manifest:
                return [None] * len(handles)  # there was no room for one, so there is nothing to compare
            return logs[rank].digests(floors[rank], handles)

        try:
            points = self._points(floors)
            found = self._groups.deviations(digests, points)
        except replay.LogError as problem:
            log.debug("replicas not compared", job=self._job.name, problem=str(problem))
            return False  # the commit has just been overwritten: the next look finds a newer one
        steps = {rank: self._step(rank, number) for rank, number in floors.items()}

        def repaired_before(group: Group) -> bool:
            return self._deviated.get(group, math.inf) <= steps[group[0][0]]

        differing = {deviation.group for deviation in found}
        if len(set(points.values())) == 1:  # all were compared
            for group in [
                group for group in self._deviated if group not in differing and repaired_before(group)
            ]:
                del self._deviated[group]  # replay has repaired it: another difference is another corruption
        if not found:
            return True
        if self._coordinator.recovering:
            return False  # the next look finds it again, if it is still there
        again = [group for group in differing if repaired_before(group)]
        if again:  # replay computes the same difference: it is the program's own
            log.warning(
                "replicas have parted", job=self._job.name, step=max(steps.values()), buffers=len(again)
            )
            self._groups.distrust(again)
            return False
        first = found[0]
        rank = first.suspects[0] if first.suspects else first.group[0][0]
        repaired = self._coordinator.corruption_found(
            self._job.sessions[rank],
            f"{first} at step {steps[rank]}" + (f" (and {len(found) - 1} more)" if len(found) > 1 else ""),
            {session.rank: session.log.floor_commit for session in sessions},
        )
        if repaired:
            self._deviated.update({deviation.group: steps[deviation.group[0][0]] for deviation in found})
        else:
            self._groups.distrust([deviation.group for deviation in found])
        return False

    def _commit(self, rank: int, number: int) -> CommitFacts | None:
        return next((commit for commit in self._commits[rank] if commit.number == number), None)

    def _points(self, floors: dict[int, int]) -> Points:
        commits = {rank: self._commit(rank, number) for rank, number in floors.items()}
        return {rank: (commit.step, commit.call) if commit else (0, 0) for rank, commit in commits.items()}

    def _step(self, rank: int, number: int) -> int:
        commit = self._commit(rank, number)
        return commit.step if commit is not None else 0

    def _read(self, sessions: list[Session]) -> bool:
        """Read commits that are new or were not complete; whether there were any."""
        news = False
        for session in sessions:
            count = session.log.commit_count
            known = self._commits.get(session.rank, ())
            settled = self._counts.get(session.rank) == count and (not known or known[-1].complete)
            if not settled or session.rank not in self._commits:
                self._commits[session.rank] = commit_facts(session.log)
                self._counts[session.rank] = count
                news = True
        return news

    def _release_all(self, sessions: list[Session]) -> None:
        """A rank has left for good: no recovery is possible any more, and the log must not fill up."""
        for session in sessions:
            session.log.floor_commit = max(session.log.floor_commit, session.log.commit_count)
            session.log.snapshot_suspended = True
            session.note = "a peer has ended: a fault of this rank can no longer be repaired"

    async def _announce_replicas(self, sessions: list[Session], floors: dict[int, int]) -> None:
        manifests = {
            session.rank: LogManifests(session.log).get(floors[session.rank], ()) for session in sessions
        }
        believed = self._tracker.check(manifests)
        self._groups.learn(manifests, self._points(floors))
        self._checked += 1
        # Often at first, so that shadows are dropped early; then rarely.
        self._next_check = min(floors.values()) + min(REPLICA_CHECK_COMMITS, 2 ** (self._checked - 1))
        if self._checked == 1:
            return  # nothing is believed yet, and what was announced before a recovery still holds
        await asyncio.gather(
            *(
                session.server.execute(pb.ReplicatedRequest(handles=sorted(believed[session.rank])))
                for session in sessions
            )
        )
        total = sum(len(handles) for handles in believed.values())
        log.debug("replicas", job=self._job.name, commits=floors, buffers=total)
