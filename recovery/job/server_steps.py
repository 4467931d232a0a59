"""Steps of a plan, carried out: commands to the device servers of ranks, and what follows from answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import structlog
from google.protobuf.message import Message

from understudy.protos import control_pb2 as pb
from understudy.recovery.agent_api.commands import NoPlace, NotDone
from understudy.recovery.agent_api.server import Server
from understudy.recovery.base.background import all_of
from understudy.recovery.job.former_servers import FormerServers
from understudy.recovery.job.loading import load_from_storage
from understudy.recovery.job.placement import Placement
from understudy.recovery.job.stages import (
    LoadFromStorage,
    Rebuild,
    ReleaseFormer,
    ReplaceServer,
    RestoreFromReplicas,
    RestoreFromSnapshot,
    Resume,
    RewindServer,
    RoundFailed,
    Step,
    Wave,
)
from understudy.recovery.planning.roll_forward import RollForward
from understudy.recovery.snapshots.restore.restorer import Restorer
from understudy.recovery.state.jobs import Job, Session

log = structlog.get_logger()


class ServerSteps:
    """Carries out steps of plans for one job."""

    def __init__(
        self,
        job: Job,
        placement: Placement,
        former: FormerServers,
        keeps_optimizer_preimages: bool,
        follow: Callable[[Session], None],
        restorer: Restorer | None,
    ) -> None:
        """`follow` is told of every session that got a new server."""
        self._job, self._placement, self._former = job, placement, former
        self._keeps_optimizer_preimages = keeps_optimizer_preimages
        self._follow, self._restorer = follow, restorer
        self._sessions: Mapping[int, Session] = {}
        self._memory: dict[int, pb.StateMemory] = {}
        """Where the state of ranks lies that went back by this plan."""

    def begin(self, sessions: Mapping[int, Session]) -> None:
        """A plan for these ranks."""
        self._sessions = sessions
        self._memory.clear()

    async def carry_out(self, wave: Wave) -> int:
        """All chains side by side; bytes of state that were copied.

        Raises RoundFailed: the first step that fails ends the others.
        """
        return sum(await all_of(self._in_turn(chain) for chain in wave))

    async def _in_turn(self, chain: tuple[Step, ...]) -> int:
        return sum([await self._do(step) for step in chain])

    async def _do(self, step: Step) -> int:
        """Bytes that were copied."""
        if isinstance(step, LoadFromStorage):
            sessions = [self._sessions[rank] for rank, _ in step.places]
            await load_from_storage(self._job, sessions, dict(step.places), self._restorer)
            return 0
        session = self._sessions[step.rank]
        match step:
            case RewindServer():
                await self._rewind(session, step)
            case ReplaceServer():
                await self._replace(session, step)
            case RestoreFromReplicas():
                return await self._restore(session, step)
            case RestoreFromSnapshot():
                return await self._reload(session, step)
            case ReleaseFormer():
                self._former.release(session)
            case Rebuild():
                await self._rebuild(session)
            case Resume():
                await self._resume(session)
        return 0

    # ------------------------------------------------------------------ replacing
    async def _rewind(self, session: Session, step: RewindServer) -> None:
        request = pb.RewindRequest(commit=step.commit, generation=self._job.generation, connect=step.connects)
        reply = await _answer_of_one(session, "rewind", request)
        if reply.error:
            # Its memory cannot be trusted any more, but a replica's can.
            suspect(session, reply.error)
            raise RoundFailed(f"rank {session.rank} could not rewind: {reply.error}")
        if reply.HasField("memory"):
            self._memory[session.rank] = reply.memory

    async def _replace(self, session: Session, step: ReplaceServer) -> None:
        try:
            server = await self._placement.replacement(session, step.keeps_source)
        except NoPlace as problem:
            raise RoundFailed(str(problem)) from problem
        session.server, session.lacks_state, session.rolled_commit = server, True, 0
        server.generation = self._job.generation
        self._follow(session)
        request = pb.AttachRequest(
            job=self._job.name,
            rank=session.rank,
            world=session.world,
            log_directory=str(session.directory),
            threads=session.threads,
            policy=policy(session.world, self._keeps_optimizer_preimages),
            generation=self._job.generation,
            from_commit=step.commit,
            run=False,
            worker=session.worker.message(),
            token=self._job.token,
            block_until_commit=session.block_until_commit,
        )
        _check(session, "attach", (await _answer(session, "attach", request)).error)

    # ------------------------------------------------------------------ restoring
    async def _restore(self, session: Session, step: RestoreFromReplicas) -> int:
        request = self._restore_request(session, step)
        reply = await _answer(session, "restore", request)
        if reply.unread:
            session.unread.update(reply.unread)
            await self._read_by_storage(session, request, reply)
            reply = await _answer(session, "restore", request)
        if reply.error and not reply.unread and step.roll_forward is not None:
            session.refused_commit = step.commit
        _check(session, "restore", reply.error)
        session.unread.clear()
        session.rolled_commit = step.commit if step.roll_forward is not None else 0
        session.former_resumed_commit = session.resumed_commit
        self._placement.arrive(session)
        session.hold_state_of(step.commit)
        return int(reply.copied_bytes)

    def _restore_request(self, session: Session, step: RestoreFromReplicas) -> pb.RestoreRequest:
        copies: dict[int, list[pb.ReplicaCopy]] = {}
        for copy in step.copies:
            copies.setdefault(copy.source, []).append(
                pb.ReplicaCopy(
                    handle=copy.handle,
                    source_handle=copy.source_handle,
                    bytes=copy.bytes,
                    digest=copy.digest,
                    other_source_handles=copy.others,
                )
            )
        sources = [
            pb.ReplicaSource(
                address=self._placement.read_from(_holder(self._sessions[rank]), session),
                rank=rank,
                copies=wanted,
            )
            for rank, wanted in copies.items()
        ]
        here = [source for source in sources if source.address.startswith("unix:")]
        for source in here:
            if source.rank in self._memory:
                source.memory.CopyFrom(self._memory[source.rank])
        return pb.RestoreRequest(
            commit=step.commit, sources=sources, generation=self._job.generation,
            connect=len(here) == len(sources),  # what has to be asked for state twice does all of it twice
            roll_forward=_message(step.roll_forward),
        )  # fmt: skip

    async def _read_by_storage(
        self, session: Session, request: pb.RestoreRequest, reply: pb.RestoreReply
    ) -> None:
        """State that its server cannot read where it is goes by way of storage of all hosts (paper 4.3)."""
        log.warning(
            "state of replicas is not reached; shared storage is tried", job=self._job.name,
            rank=session.rank, of=list(reply.unread), problem=reply.error,
        )  # fmt: skip
        for source in request.sources:
            if source.rank not in reply.unread:
                continue
            sizes = {copy.source_handle: copy.bytes for copy in source.copies}
            ranges = [pb.StateRange(handle=handle, bytes=size) for handle, size in sizes.items()]
            wanted = pb.WriteStateRequest(generation=self._job.generation, ranges=ranges)
            holder = self._sessions[source.rank]
            written = await _answer(holder, "write its state to shared storage", wanted, _holder(holder))
            if written.error:
                raise RoundFailed(
                    f"rank {session.rank} could not restore: {reply.error}; nor by way of shared storage: "
                    f"{written.error}"
                )
            source.address = f"shared:{written.name}"

    async def _reload(self, session: Session, step: RestoreFromSnapshot) -> int:
        request = pb.RestoreRequest(commit=step.commit, from_snapshot=True, connect=True,
                                    generation=self._job.generation)  # fmt: skip
        reply = await _answer(session, "restore its snapshot", request)
        if reply.error:
            kept = session.log.snapshots()
            session.refused_snapshots |= {one.serial for one in kept if one.commit.number == step.commit}
            suspect(session, reply.error)
        _check(session, "restore its snapshot", reply.error)
        session.unread.clear()
        session.hold_state_of(step.commit)
        session.rolled_commit = session.restores_from_image = 0
        if step.arrives:
            self._placement.arrive(session)
        # Commits and their pre-images begin anew there.  Only now: if the server does not get that far, what
        # lies between the snapshot and the floor is as gone as it was.
        session.log.floor_commit = min(session.log.floor_commit, step.commit)
        return int(reply.shadow_bytes)

    # ------------------------------------------------------------------ rebuilding
    async def _rebuild(self, session: Session) -> None:
        session.generation = self._job.generation
        request = pb.RebuildRequest(generation=session.generation)
        reply = await _answer(session, "rebuild its communicators", request)
        _check(session, "rebuild its communicators", reply.error)

    async def _resume(self, session: Session) -> None:
        session.resumed_commit = session.restored_commit  # even if no answer comes
        request = pb.ResumeRequest(generation=self._job.generation)
        _check(session, "resume", (await _answer_of_one(session, "resume", request)).error)


def policy(world: int, keeps_optimizer_preimages: bool) -> pb.Policy:
    """What a server keeps for recovery: nothing where no other rank could hold a replica."""
    return pb.Policy(protect=world > 1, optimizer_preimages=keeps_optimizer_preimages)


def suspect(session: Session, problem: str) -> None:
    """End a server that does not do as it is told; it counts as dead from here on."""
    if session.server.process.running:
        log.error("a device server is ended", rank=session.rank, pid=session.server.pid, problem=problem)
    session.lacks_state = True


def _message(roll: RollForward | None) -> pb.RollForward | None:
    if roll is None:
        return None
    return pb.RollForward(
        rolled=roll.rolled, steady=roll.steady, own=roll.own, lost=roll.lost, step_digest=roll.step_digest
    )


def _holder(session: Session) -> Server:
    """The server that holds the state of a rank while it is copied."""
    return session.source_server or session.server


async def _answer(session: Session, what: str, command: Message, server: Server | None = None) -> Any:
    """`server`: which one is to do it, if not the one that the rank has.  Raises RoundFailed."""
    try:
        return await (server or session.server).execute(command)
    except NotDone as problem:
        raise RoundFailed(f"rank {session.rank} could not {what}: {problem}") from problem


async def _answer_of_one(session: Session, what: str, command: Message) -> Any:
    """To what no other rank holds up: a server that is late with it hangs, and would not park either."""
    try:
        return await session.server.execute(command)
    except NotDone as problem:
        if problem.late:
            suspect(session, f"it did not {what}: {problem}")
        raise RoundFailed(f"rank {session.rank} could not {what}: {problem}") from problem


def _check(session: Session, what: str, error: str) -> None:
    if error:
        raise RoundFailed(f"rank {session.rank} could not {what}: {error}")
