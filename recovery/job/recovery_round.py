"""One round of a recovery: park, plan, carry the plan out, resume.  It either succeeds or raises."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from understudy.protos import control_pb2 as pb
from understudy.recovery.agent_api.commands import NotDone
from understudy.recovery.base.background import all_of
from understudy.recovery.base.naming_ranks import named
from understudy.recovery.base.timing import TIMING, Timing
from understudy.recovery.host.evidence import concerned, rank_facts
from understudy.recovery.job.former_servers import FormerServers
from understudy.recovery.job.loading import StorageFailed
from understudy.recovery.job.placement import Placement
from understudy.recovery.job.server_steps import ServerSteps, suspect
from understudy.recovery.job.stages import RoundFailed, stages_of
from understudy.recovery.planning.facts import BEGINNING, Facts, FaultFacts, FaultKind
from understudy.recovery.planning.planner import FailRank, Plan, Reload, plan
from understudy.recovery.snapshots.restore.restorer import Restorer
from understudy.recovery.state.jobs import Job, Session
from understudy.recovery.state.recovery_progress import Stage

log = structlog.get_logger()

LOOK_S, STUCK_S = 0.001, 0.5
"""Pause between looks at ranks inside their optimizer step; if none moves for so long, they are stuck."""
LINKS = (FaultKind.COLLECTIVE_FAILED, FaultKind.COLLECTIVE_HUNG)
"""It may be that hosts do not reach each other."""


async def nobody_else() -> None:
    """Is to know of what this proxyd decides."""


@dataclass
class Result:
    """What a round did."""

    plan: Plan
    copied_bytes: int = 0
    ended_ns: dict[Stage, int] = field(default_factory=dict)
    """When each stage of the plan was done: CLOCK_MONOTONIC, nanoseconds."""


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
        self._placement = placement
        self._restorer = restorer
        self._storage_problem = ""
        """Of the incident that is being recovered from."""
        self._job = job
        self._keeps_optimizer_preimages = keeps_optimizer_preimages
        self._former = FormerServers(placement)
        self._steps = ServerSteps(job, placement, self._former, keeps_optimizer_preimages, follow, restorer)

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
        self._job.progress.enter(Stage.AWAITING)
        await self._placement.ready(sessions, bool(tried) or fault.kind in LINKS)
        self.begun = True
        await self._stand_still(sessions)
        self._job.progress.enter(Stage.PLANNING)
        facts = self.facts(fault)  # without those whose program ended meanwhile
        if not {rank.rank for rank in facts.ranks} <= {session.rank for session in sessions}:
            raise RoundFailed("a rank has joined those that the fault concerns while they were parked")
        await self._check_that_deaths_were_noticed(sessions, fault)
        chosen = plan(facts)
        await self._record(fault, chosen, tried)
        repaired = set() if fault.kind is FaultKind.VALIDATION else chosen.repaired
        if len(tried) <= 1:  # the first round of a fault
            self._repaired.clear()
        self._repaired |= repaired
        result = await self._go_back(chosen, self._going_on(chosen, facts))
        for rank in self._repaired if repaired else ():
            if (recovered := self._job.sessions.get(rank)) is not None:
                recovered.recoveries += 1
        return result

    async def _stand_still(self, sessions: Sequence[Session]) -> None:
        """Until all servers that live do."""
        for session in sessions:
            self._former.release(session)
        survivors = [session for session in sessions if session.has_state]
        self._job.progress.enter(Stage.PARKING)
        await self._let_steps_end(survivors)
        await all_of(self._park(session) for session in survivors)
        for session in survivors:
            if session.rolling:
                session.break_off_roll_forward()
            if session.world > 1 and session.log.sealed:
                # As if it had died: its state is of no commit, and none can be had from it.
                log.info("a device server has no way back", job=self._job.name, rank=session.rank)
                session.lacks_state = True

    async def _record(self, fault: FaultFacts, chosen: Plan, tried: list[str]) -> None:
        """Until the decision outlives us."""
        if self._restorer is not None and any(isinstance(a, Reload) and a.stored for a in chosen.actions):
            self._restorer.break_off()
        log.info(
            "plan", job=self._job.name, plan=chosen.name.value, reason=chosen.reason, targets=chosen.targets
        )
        if fault.kind is not FaultKind.VALIDATION:  # which repairs nothing
            tried.append(chosen.name.value)
        self._job.progress.enter(Stage.RECORDING)
        self._job.decision = _decision(self._job.generation, fault, chosen)
        await self._decided()

    def _going_on(self, chosen: Plan, facts: Facts) -> dict[int, Session]:
        """Sessions by their ranks, once those have failed that the plan gives up.

        Raises RoundFailed: the program of a rank that goes back has ended since it was made.
        """
        known = self._job.sessions
        for action in chosen.actions:
            if isinstance(action, FailRank) and action.rank in known:
                known[action.rank].fail(action.message)
        here = {rank.rank: known[rank.rank] for rank in facts.ranks if rank.rank in known}
        going_on = {rank: session for rank, session in here.items() if session.active}
        if gone := sorted(chosen.targets.keys() - going_on.keys()):
            raise RoundFailed(f"rank {named(gone)} has ended since the plan was made")
        return going_on

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

    async def _go_back(self, chosen: Plan, going_on: Mapping[int, Session]) -> Result:
        """Raises RoundFailed."""
        result = Result(chosen)
        for session in going_on.values():  # what lies behind the target may be what has to be mended
            last = chosen.cut.get(session.rank, BEGINNING).index
            session.durable = [durable for durable in session.durable if durable.commit.index <= last]
        self._steps.begin(going_on)
        for stage in stages_of(chosen, going_on):
            self._job.progress.enter(stage.stage)
            try:
                for wave in stage.waves:
                    result.copied_bytes += await self._steps.carry_out(wave)
            except StorageFailed as problem:
                self._storage_problem = str(problem)
                raise
            if stage.stage is Stage.RESTORING:
                await self._former.emptied()
            result.ended_ns[stage.stage] = time.monotonic_ns()
        self._storage_problem = ""
        return result

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
            suspect(session, f"it did not park: {problem}")
            raise RoundFailed(f"rank {session.rank} did not park: {problem}") from problem
        if reply.error:
            suspect(session, reply.error)
            raise RoundFailed(f"rank {session.rank} did not park: {reply.error}")


def _decision(generation: int, fault: FaultFacts, chosen: Plan) -> pb.JournaledDecision:
    return pb.JournaledDecision(
        generation=generation, fault=fault.kind.value, ranks=fault.ranks, plan=chosen.name.value,
        reason=chosen.reason, targets=chosen.targets, decided_ms=int(time.time() * 1000),
    )  # fmt: skip
