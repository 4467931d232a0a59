"""One round of a recovery: park, plan, carry the plan out, resume.  It either succeeds or raises."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import structlog

from recovery.control import address, pb, trouble
from recovery.evidence import rank_facts
from recovery.facts import Facts, FaultFacts
from recovery.jobs import Job, Session
from recovery.planner import Continue, Lose, Plan, PlanName, Restart, Rewind, plan
from recovery.servers import Server, ServerPool
from recovery.spawner import SpawnerError

log = structlog.get_logger()
Value = TypeVar("Value")

PARK_S, ATTACH_S, REWIND_S, RESTORE_S, REBUILD_S, RESUME_S = 20.0, 30.0, 120.0, 600.0, 60.0, 20.0
"""Deadlines of the steps, seconds."""


class RoundFailed(RuntimeError):
    """Something broke during the recovery itself; plan again from what is true then."""


@dataclass
class Result:
    """What a round did and when: CLOCK_MONOTONIC marks, nanoseconds."""

    plan: Plan
    attached_ns: int = 0
    restored_ns: int = 0
    resumed_ns: int = 0
    copied_bytes: int = 0


class Round:
    """Carries out one plan for one job in one generation."""

    def __init__(
        self, job: Job, pool: ServerPool, keeps_optimizer_preimages: bool, follow: Callable[[Session], None]
    ) -> None:
        """`follow` is told of every session that got a new server."""
        self._job = job
        self._pool = pool
        self._follow = follow
        self._keeps_optimizer_preimages = keeps_optimizer_preimages

    async def run(self, fault: FaultFacts) -> Result:
        """Until every rank was resumed or lost; raises RoundFailed."""
        sessions = self._job.active_sessions()
        for session in sessions:
            session.state = "recovering"
        survivors = [session for session in sessions if _has_state(session)]
        await _all(self._park(session) for session in survivors)
        facts = Facts(
            ranks=tuple(rank_facts(session, self._keeps_optimizer_preimages) for session in sessions),
            fault=fault,
            departed=tuple(sorted(self._job.departed)),
        )
        chosen = plan(facts)
        log.info(
            "plan", job=self._job.name, plan=chosen.name.value, reason=chosen.reason, targets=chosen.targets
        )
        if chosen.name is PlanName.GIVE_UP:
            return await self._give_up(chosen)
        return await self._go_back(chosen, sessions)

    async def _go_back(self, chosen: Plan, sessions: Sequence[Session]) -> Result:
        result = Result(chosen)
        of_rank = {session.rank: session for session in sessions}
        restarts = [action for action in chosen.actions if isinstance(action, Restart)]
        rewinds = [action for action in chosen.actions if isinstance(action, Rewind)]
        await _all(
            [
                *(self._attach(of_rank[action.rank], action.commit) for action in restarts),
                *(self._rewind(of_rank[action.rank], action.commit) for action in rewinds),
            ]
        )
        result.attached_ns = time.monotonic_ns()
        copied = await _all(self._restore(of_rank, action) for action in restarts)
        result.copied_bytes = sum(copied)
        result.restored_ns = time.monotonic_ns()
        await _all(self._rebuild(session) for session in sessions)
        await _all(self._resume(session) for session in sessions)
        result.resumed_ns = time.monotonic_ns()
        for session in sessions:
            session.generation = self._job.generation
        for action in restarts or rewinds:
            of_rank[action.rank].recoveries += 1
        return result

    async def _give_up(self, chosen: Plan) -> Result:
        now = time.monotonic_ns()
        for action in chosen.actions:
            session = self._job.sessions.get(action.rank)
            if session is None:
                continue
            if isinstance(action, Lose):
                session.lose(action.message)
            elif isinstance(action, Continue):
                await self._resume(session)
                session.state = "running"
        return Result(chosen, now, now, now)

    async def _park(self, session: Session) -> None:
        reason = f"recovery, generation {self._job.generation}"
        try:
            reply = await session.server.stub.Park(pb.ParkRequest(reason=reason), timeout=PARK_S)
        except grpc.RpcError as problem:
            self._suspect(session, f"it did not park: {trouble(problem)}")
            raise RoundFailed(f"rank {session.rank} did not park: {trouble(problem)}") from problem
        if reply.error:
            self._suspect(session, reply.error)
            raise RoundFailed(f"rank {session.rank} did not park: {reply.error}")

    async def _attach(self, session: Session, commit: int) -> None:
        server = await self._replacement(session)
        session.server, session.hollow = server, True
        self._follow(session)
        request = pb.AttachRequest(
            job=self._job.name,
            rank=session.rank,
            world=session.world,
            log_directory=str(session.directory),
            threads=session.threads,
            policy=policy(session.world, self._keeps_optimizer_preimages),
            generation=self._job.generation,
            from_commit=commit,
            run=False,
        )
        reply = await _answer(session, "attach", server.stub.Attach(request, timeout=ATTACH_S))
        _check(session, "attach", reply.error)

    async def _replacement(self, session: Session) -> Server:
        """A ready server in place of the session's, whose process is ended if it is not yet."""
        self._pool.retire(session.server)
        try:
            return await self._pool.take(session.device)
        except SpawnerError as problem:
            raise RoundFailed(f"rank {session.rank} got no new device server: {problem}") from problem

    async def _rewind(self, session: Session, commit: int) -> None:
        call = session.server.stub.Rewind(pb.RewindRequest(commit=commit), timeout=REWIND_S)
        reply = await _answer(session, "rewind", call)
        if reply.error:
            # Its memory cannot be trusted any more, but a replica's can.
            self._suspect(session, reply.error)
            raise RoundFailed(f"rank {session.rank} could not rewind: {reply.error}")

    async def _restore(self, of_rank: dict[int, Session], action: Restart) -> int:
        session = of_rank[action.rank]
        copies: dict[int, list[pb.ReplicaCopy]] = {}
        for copy in action.copies:
            copies.setdefault(copy.source, []).append(
                pb.ReplicaCopy(
                    handle=copy.handle, source_handle=copy.source_handle, bytes=copy.bytes, digest=copy.digest
                )
            )
        sources = [
            pb.ReplicaSource(address=address(of_rank[rank].server.socket), rank=rank, copies=wanted)
            for rank, wanted in copies.items()
        ]
        call = session.server.stub.Restore(
            pb.RestoreRequest(commit=action.commit, sources=sources), timeout=RESTORE_S
        )
        reply = await _answer(session, "restore", call)
        _check(session, "restore", reply.error)
        session.hollow, session.restored_commit = False, action.commit
        return int(reply.copied_bytes)

    async def _rebuild(self, session: Session) -> None:
        request = pb.RebuildRequest(generation=self._job.generation)
        call = session.server.stub.RebuildCommunicators(request, timeout=REBUILD_S)
        reply = await _answer(session, "rebuild its communicators", call)
        _check(session, "rebuild its communicators", reply.error)

    async def _resume(self, session: Session) -> None:
        call = session.server.stub.Resume(pb.ResumeRequest(), timeout=RESUME_S)
        reply = await _answer(session, "resume", call)
        _check(session, "resume", reply.error)

    def _suspect(self, session: Session, problem: str) -> None:
        """End a server that does not do as it is told; it counts as dead from here on."""
        if session.server.process.running:
            log.error("a device server is ended", rank=session.rank, pid=session.server.pid, problem=problem)
        session.hollow = True


def policy(world: int, keeps_optimizer_preimages: bool) -> pb.Policy:
    """What a server keeps for recovery: nothing where no other rank could hold a replica."""
    return pb.Policy(protect=world > 1, optimizer_preimages=keeps_optimizer_preimages)


def _has_state(session: Session) -> bool:
    return session.server.process.running and not session.hollow


async def _answer(session: Session, what: str, call: Awaitable[Value]) -> Value:
    try:
        return await call
    except grpc.RpcError as problem:
        raise RoundFailed(f"rank {session.rank} could not {what}: {trouble(problem)}") from problem


def _check(session: Session, what: str, error: str) -> None:
    if error:
        raise RoundFailed(f"rank {session.rank} could not {what}: {error}")


async def _all(works: Iterable[Coroutine[Any, Any, Value]]) -> list[Value]:
    """All at once; the first failure cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except* RoundFailed as failures:
        raise RoundFailed(str(failures.exceptions[0])) from failures
    return [task.result() for task in tasks]
