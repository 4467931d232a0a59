"""One round of a recovery: park, plan, carry the plan out, resume.  It either succeeds or raises."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from google.protobuf.message import Message

from understudy.protos import control_pb2 as pb
from understudy.recovery.agent_api.commands import NoPlace, NotDone
from understudy.recovery.agent_api.server import Server
from understudy.recovery.base.background import all_of
from understudy.recovery.base.timing import TIMING, Timing
from understudy.recovery.host.evidence import concerned, rank_facts
from understudy.recovery.job.placement import Placement
from understudy.recovery.planning.cuts import Cut
from understudy.recovery.planning.facts import BEGINNING, Facts, FaultFacts, FaultKind
from understudy.recovery.planning.planner import FailRank, Plan, Reload, Rewind, plan
from understudy.recovery.planning.restarts import Restart
from understudy.recovery.snapshots.restore.restorer import NotRestored, Restorer
from understudy.recovery.state.durable import Durable
from understudy.recovery.state.jobs import Job, Session
from understudy.recovery.state.recovery_progress import Stage

log = structlog.get_logger()

LOOK_S, STUCK_S = 0.001, 0.5
"""Pause between looks at ranks inside their optimizer step; if none moves for so long, they are stuck."""
LINKS = (FaultKind.COLLECTIVE_FAILED, FaultKind.COLLECTIVE_HUNG)
"""It may be that hosts do not reach each other."""
END_S = 10.0
"""How long a server that was killed may take to end, seconds: until then its memory cannot be used."""


async def nobody_else() -> None:
    """Is to know of what this proxyd decides."""


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
    """Carries out plans for one job, one in each generation."""

    def __init__(
        self,
        job: Job,
        placement: Placement,
        keeps_optimizer_preimages: bool,
        follow: Callable[[Session], None],
        restorer: Restorer | None = None,
        decided: Callable[[], Awaitable[None]] = nobody_else,
        timing: Timing = TIMING,
    ) -> None:
        """`follow` is told of every session that got a new server.

        `decided` returns once the job's decision outlives us, as it is to before any of it is done.
        """
        self.begun = False
        """Whether the newest one got further than to wait until all its ranks can be steered."""
        self._repaired: set[int] = set()  # in this round, and in those for the same fault that failed
        self._decided, self._timing = decided, timing
        self._memory: dict[int, pb.StateMemory] = {}
        """Where the state of ranks lies that went back in this round."""
        self._ending: list[Server] = []
        """Whose memory on a GPU the ranks may need when they go on."""
        self._placement = placement
        self._restorer = restorer
        self._storage_problem = ""
        """Of the incident that is being recovered from."""
        self._job = job
        self._follow = follow
        self._keeps_optimizer_preimages = keeps_optimizer_preimages

    def concerned(self, faulted: Sequence[int]) -> tuple[list[Session], tuple[int, ...]]:
        """Sessions that must go back together because of a fault, and ranks that they need but have left."""
        return concerned(self._job, faulted, self._keeps_optimizer_preimages)

    def facts(self, fault: FaultFacts) -> Facts:
        """What is known now of everybody whom a fault concerns."""
        sessions, departed = self.concerned(fault.ranks)
        return Facts(
            ranks=tuple(rank_facts(session, self._keeps_optimizer_preimages) for session in sessions),
            fault=fault,
            departed=departed,
            not_replayable=self._job.not_replayable,
            homeless=tuple(session.rank for session in sessions if self._placement.is_homeless(session)),
            free_devices=self._placement.free_devices(),
            storage_problem=self._storage_problem,
        )

    async def run(self, fault: FaultFacts, tried: list[str]) -> Result:
        """Until every rank was resumed or lost; raises RoundFailed.  Adds the plan's name to `tried`."""
        self.begun = False
        sessions, _ = self.concerned(fault.ranks)
        for session in sessions:
            session.state = "recovering"
        progress = self._job.progress
        progress.enter(Stage.AWAITING)
        await self._placement.ready(sessions, bool(tried) or fault.kind in LINKS)
        self.begun = True
        for session in sessions:
            self._drop_source(session)
        survivors = [session for session in sessions if session.has_state]
        progress.enter(Stage.PARKING)
        await self._let_steps_end(survivors)
        await all_of(self._park(session) for session in survivors)
        for session in survivors:
            if session.rolling:
                session.break_off_roll_forward()
            if session.world > 1 and session.log.sealed:
                # As if it had died: its state is of no commit, and none can be had from it.
                log.info("a device server has no way back", job=self._job.name, rank=session.rank)
                session.lacks_state = True
        progress.enter(Stage.PLANNING)
        facts = self.facts(fault)  # without those whose program ended meanwhile
        if not {rank.rank for rank in facts.ranks} <= {session.rank for session in sessions}:
            raise RoundFailed("a rank has joined those that the fault concerns while they were parked")
        await self._check_that_deaths_were_noticed(sessions, fault)
        chosen = plan(facts)
        if self._restorer is not None and any(isinstance(a, Reload) and a.stored for a in chosen.actions):
            self._restorer.break_off()
        log.info(
            "plan", job=self._job.name, plan=chosen.name.value, reason=chosen.reason, targets=chosen.targets
        )
        if fault.kind is not FaultKind.VALIDATION:  # which repairs nothing
            tried.append(chosen.name.value)
        progress.enter(Stage.RECORDING)
        self._job.decision = _decision(self._job.generation, fault, chosen)
        await self._decided()
        for action in chosen.actions:
            if isinstance(action, FailRank):
                self._job.sessions[action.rank].fail(action.message)
        concerned_ranks = [self._job.sessions[rank.rank] for rank in facts.ranks]
        repaired = set() if fault.kind is FaultKind.VALIDATION else chosen.repaired
        if len(tried) <= 1:  # the first round of a fault
            self._repaired.clear()
        self._repaired |= repaired
        result = await self._go_back(chosen, [session for session in concerned_ranks if session.active])
        for rank in self._repaired if repaired else ():
            if (recovered := self._job.sessions.get(rank)) is not None:
                recovered.recoveries += 1
        return result

    async def _check_that_deaths_were_noticed(self, sessions: Sequence[Session], fault: FaultFacts) -> None:
        """A server that died a moment ago has to be told of: once it is replaced, its notice means nothing.

        The notice is on its way: it ends this round, or the pause that follows it.
        """
        broken = {*fault.ranks} - {*fault.sound}
        for session in sessions:
            known = session.rank in broken or session.server.retired
            if session.active and not known and not session.server.process.running:
                await asyncio.sleep(self._timing.notice_s)
                raise RoundFailed(f"the device server of rank {session.rank} has died as well")

    async def _go_back(self, chosen: Plan, sessions: Sequence[Session]) -> Result:
        result = Result(chosen)
        self._job.progress.enter(Stage.REPLACING)
        self._memory.clear()
        of_rank = {session.rank: session for session in sessions}
        restarts = [action for action in chosen.actions if isinstance(action, Restart)]
        rewinds = [action for action in chosen.actions if isinstance(action, Rewind)]
        reloads = [action for action in chosen.actions if isinstance(action, Reload)]
        for session in sessions:  # what lies behind the target may be what has to be mended
            last = chosen.cut.get(session.rank, BEGINNING).index
            session.durable = [durable for durable in session.durable if durable.commit.index <= last]
        await self._bring_back(of_rank, chosen.cut, [action for action in reloads if action.stored])
        await all_of(
            [
                *(self._replace(of_rank[action.rank], action) for action in restarts),
                *(
                    self._attach(of_rank[action.rank], action.commit, keep_source=False)
                    for action in reloads
                    if action.fresh
                ),
                *(self._rewind(of_rank[action.rank], action.commit, connect=True) for action in rewinds),
            ]
        )
        result.attached_ns = time.monotonic_ns()
        self._job.progress.enter(Stage.RESTORING)
        copied = await all_of(
            [
                *(self._restore(of_rank, action) for action in restarts),
                *(self._reload(of_rank[action.rank], action) for action in reloads),
            ]
        )
        result.copied_bytes = sum(copied)
        for session in sessions:
            self._drop_source(session)
        await all_of(self._placement.emptied(server) for server in self._ending)
        self._ending.clear()
        result.restored_ns = time.monotonic_ns()
        self._job.progress.enter(Stage.REBUILDING)
        await all_of(self._rebuild(session) for session in sessions)
        await all_of(self._resume(session) for session in sessions)
        result.resumed_ns = time.monotonic_ns()
        self._storage_problem = ""
        return result

    async def _bring_back(self, of_rank: dict[int, Session], cut: Cut, reloads: Sequence[Reload]) -> None:
        """Snapshots of storage into host memory, where new servers find them."""
        sets: dict[int, dict[int, Durable]] = {}
        for action in reloads:
            kept = of_rank[action.rank].durable
            durable = next(d for d in kept if d.commit.place == cut[action.rank].place)
            sets.setdefault(durable.serial, {})[action.rank] = durable
        for serial, of in sets.items():
            ranks = [of_rank[rank] for rank in of]
            await all_of(self._make_way(session) for session in ranks)
            try:
                if self._restorer is None:
                    raise NotRestored("proxyd has no storage for snapshots")
                directories = {session.rank: session.directory for session in ranks}
                await self._restorer.restore(next(iter(of.values())), directories)
            except NotRestored as problem:
                message = f"snapshot {serial} does not come back from storage: {problem}"
                self._storage_problem = message
                for session in self._job.sessions.values():
                    session.durable = [durable for durable in session.durable if durable.serial != serial]
                    session.persist_note = message
                log.error(
                    "a stored snapshot is of no use", job=self._job.name, serial=serial, problem=str(problem)
                )
                raise RoundFailed(message) from problem
            for session in ranks:
                session.log.snapshot_floor = serial
                session.refused_snapshots.discard(serial)

    async def _make_way(self, session: Session) -> None:
        """End the server of a rank whose memory in the log is about to be written."""
        session.server.retired = session.lacks_state = True
        try:
            await asyncio.wait_for(session.server.process.end(0.0), END_S)
        except TimeoutError:
            raise RoundFailed(f"the device server of rank {session.rank} does not end") from None

    async def _let_steps_end(self, survivors: Sequence[Session]) -> None:
        """Out of an optimizer step without pre-images no way leads back, but most ranks soon reach its end.

        Not those that wait for a rank that has died, or for their program.
        """
        loop = asyncio.get_running_loop()
        seen: list[int] = []
        moved = loop.time()
        # Others go back by pre-images or snapshots.
        protected = [session for session in survivors if session.world > 1 and session.log.final_steps]
        while inside := [session for session in protected if session.active and session.inside_step]:
            cursors = [session.log.cursor_index for session in inside]
            if cursors != seen:
                seen, moved = cursors, loop.time()
            elif loop.time() - moved > STUCK_S:
                return
            await asyncio.sleep(LOOK_S)

    async def _park(self, session: Session) -> None:
        reason = f"recovery, generation {self._job.generation}"
        try:
            request = pb.ParkRequest(reason=reason, generation=self._job.generation)
            reply = await session.server.execute(request)
        except NotDone as problem:
            self._suspect(session, f"it did not park: {problem}")
            raise RoundFailed(f"rank {session.rank} did not park: {problem}") from problem
        if reply.error:
            self._suspect(session, reply.error)
            raise RoundFailed(f"rank {session.rank} did not park: {reply.error}")

    async def _replace(self, session: Session, action: Restart) -> None:
        if action.keeps_source:
            await self._rewind(session, action.commit)
        await self._attach(session, action.commit, action.keeps_source)

    async def _attach(self, session: Session, commit: int, keep_source: bool) -> None:
        try:
            server = await self._placement.replacement(session, keep_source)
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
            from_commit=commit,
            run=False,
            worker=session.worker.message(),
            token=self._job.token,
            block_until_commit=session.block_until_commit,
        )
        reply = await _answer(session, "attach", request, server)
        _check(session, "attach", reply.error)

    def _drop_source(self, session: Session) -> None:
        source = session.source_server
        if source is session.server:  # a round that was interrupted before there was another one
            source.retired = not source.process.running  # of its death nobody was told meanwhile
        elif source is not None and session.lacks_state and self._placement.could_serve(source, session):
            # What came after it did not get as far as to hold what the sound one holds.
            self._retire(session, session.server)
            session.server, session.lacks_state, source.retired = source, False, False
        elif source is not None:
            self._retire(session, source)
        session.source_server = None

    def _retire(self, session: Session, server: Server) -> None:
        self._placement.retire(server)
        if session.on_gpu:
            self._ending.append(server)

    async def _rewind(self, session: Session, commit: int, *, connect: bool = False) -> None:
        """`connect`: it will be this server that goes on."""
        request = pb.RewindRequest(commit=commit, generation=self._job.generation, connect=connect)
        reply = await self._answer_of_one(session, "rewind", request)
        if reply.error:
            # Its memory cannot be trusted any more, but a replica's can.
            self._suspect(session, reply.error)
            raise RoundFailed(f"rank {session.rank} could not rewind: {reply.error}")
        if reply.HasField("memory"):
            self._memory[session.rank] = reply.memory

    async def _restore(self, of_rank: dict[int, Session], action: Restart) -> int:
        session = of_rank[action.rank]
        copies: dict[int, list[pb.ReplicaCopy]] = {}
        for copy in action.copies:
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
                address=self._placement.read_from(_holder(of_rank[rank]), session), rank=rank, copies=wanted
            )
            for rank, wanted in copies.items()
        ]
        here = [source for source in sources if source.address.startswith("unix:")]
        for source in here:
            if source.rank in self._memory:
                source.memory.CopyFrom(self._memory[source.rank])
        request = pb.RestoreRequest(
            commit=action.commit, sources=sources, generation=self._job.generation,
            connect=len(here) == len(sources),  # what has to be asked for state twice does all of it twice
        )  # fmt: skip
        if (roll := action.roll_forward) is not None:
            message = pb.RollForward(rolled=roll.rolled, steady=roll.steady, own=roll.own, lost=roll.lost,
                                     step_digest=roll.step_digest)  # fmt: skip
            request.roll_forward.CopyFrom(message)
        reply = await _answer(session, "restore", request)
        if reply.unread:
            session.unread.update(reply.unread)
            await self._read_by_storage(of_rank, session, request, reply)
            reply = await _answer(session, "restore", request)
        if reply.error and not reply.unread and roll is not None:
            session.refused_commit = action.commit
        _check(session, "restore", reply.error)
        session.unread.clear()
        session.rolled_commit = action.commit if roll is not None else 0
        session.former_resumed_commit = session.resumed_commit
        self._placement.arrive(session)
        session.hold_state_of(action.commit)
        return int(reply.copied_bytes)

    async def _read_by_storage(
        self,
        of_rank: dict[int, Session],
        session: Session,
        request: pb.RestoreRequest,
        reply: pb.RestoreReply,
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
            holder = of_rank[source.rank]
            server = _holder(holder)
            written = await _answer(holder, "write its state to shared storage", wanted, server)
            if written.error:
                raise RoundFailed(
                    f"rank {session.rank} could not restore: {reply.error}; nor by way of shared storage: "
                    f"{written.error}"
                )
            source.address = f"shared:{written.name}"

    async def _reload(self, session: Session, action: Reload) -> int:
        request = pb.RestoreRequest(commit=action.commit, from_snapshot=True, connect=True,
                                    generation=self._job.generation)  # fmt: skip
        reply = await _answer(session, "restore its snapshot", request)
        if reply.error:
            kept = session.log.snapshots()
            session.refused_snapshots |= {one.serial for one in kept if one.commit.number == action.commit}
            self._suspect(session, reply.error)
        _check(session, "restore its snapshot", reply.error)
        session.unread.clear()
        session.hold_state_of(action.commit)
        session.rolled_commit = session.restores_from_image = 0
        if action.fresh:
            self._placement.arrive(session)
        # Commits and their pre-images begin anew there.  Only now: if the server does not get that far, what
        # lies between the snapshot and the floor is as gone as it was.
        session.log.floor_commit = min(session.log.floor_commit, action.commit)
        return int(reply.shadow_bytes)

    async def _rebuild(self, session: Session) -> None:
        session.generation = self._job.generation
        request = pb.RebuildRequest(generation=session.generation)
        reply = await _answer(session, "rebuild its communicators", request)
        _check(session, "rebuild its communicators", reply.error)

    async def _resume(self, session: Session) -> None:
        session.resumed_commit = session.restored_commit  # even if no answer comes
        request = pb.ResumeRequest(generation=self._job.generation)
        reply = await self._answer_of_one(session, "resume", request)
        _check(session, "resume", reply.error)

    async def _answer_of_one(self, session: Session, what: str, command: Message) -> Any:
        """To what no other rank holds up: a server that is late with it hangs, and would not park either."""
        try:
            return await session.server.execute(command)
        except NotDone as problem:
            if problem.late:
                self._suspect(session, f"it did not {what}: {problem}")
            raise RoundFailed(f"rank {session.rank} could not {what}: {problem}") from problem

    def _suspect(self, session: Session, problem: str) -> None:
        """End a server that does not do as it is told; it counts as dead from here on."""
        if session.server.process.running:
            log.error("a device server is ended", rank=session.rank, pid=session.server.pid, problem=problem)
        session.lacks_state = True


def policy(world: int, keeps_optimizer_preimages: bool) -> pb.Policy:
    """What a server keeps for recovery: nothing where no other rank could hold a replica."""
    return pb.Policy(protect=world > 1, optimizer_preimages=keeps_optimizer_preimages)


def _decision(generation: int, fault: FaultFacts, chosen: Plan) -> pb.JournaledDecision:
    return pb.JournaledDecision(
        generation=generation, fault=fault.kind.value, ranks=fault.ranks, plan=chosen.name.value,
        reason=chosen.reason, targets=chosen.targets, decided_ms=int(time.time() * 1000),
    )  # fmt: skip


def _holder(session: Session) -> Server:
    """The server that holds the state of a rank while it is copied."""
    return session.source_server or session.server


async def _answer(session: Session, what: str, command: Message, server: Server | None = None) -> Any:
    """`server`: which one is to do it, if not the one that the rank has."""
    try:
        return await (server or session.server).execute(command)
    except NotDone as problem:
        raise RoundFailed(f"rank {session.rank} could not {what}: {problem}") from problem


def _check(session: Session, what: str, error: str) -> None:
    if error:
        raise RoundFailed(f"rank {session.rank} could not {what}: {error}")
