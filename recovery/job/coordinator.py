"""Recovery of one job: from the notice of a fault to ranks that have replayed past it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

import structlog

from understudy.protos import control_pb2 as pb
from understudy.recovery.base.timing import TIMING, Timing
from understudy.recovery.host.evidence import refuse_snapshots_behind
from understudy.recovery.job.holding import hold, let_go
from understudy.recovery.job.noticed import ENDED, Noticed
from understudy.recovery.job.placement import Placement
from understudy.recovery.job.recovery_round import Result, Round, nobody_else
from understudy.recovery.job.replayed_values import ReplayedValues
from understudy.recovery.job.stages import RoundFailed
from understudy.recovery.job.validation_barrier import ValidationBarrier
from understudy.recovery.planning.facts import SERVERS_SOUND, FaultFacts, FaultKind
from understudy.recovery.planning.planner import (
    ENDS,
    Plan,
    PlanName,
    goes_back_a_minibatch,
    parked_anywhere,
    plan,
)
from understudy.recovery.snapshots.restore.restorer import Restorer
from understudy.recovery.state.incidents import (
    CALLS,
    Fault,
    Outcome,
    entry_of,
    told_of,
    with_transfer,
    with_tried,
)
from understudy.recovery.state.jobs import Job, Session
from understudy.recovery.state.recovery_progress import Stage

log = structlog.get_logger()

MOST_ROUNDS = 8
"""Plans tried for one incident before giving up.  To wait for whoever is to carry them out is none."""
PEER_DEATH_WITHIN = 0.25
"""Seconds a failed collective waits for the notice of a death that explains it."""
LONGEST_PAUSE = 16.0
"""Seconds between two plans, the most; each pause is twice the one before (networks heal, spares start)."""


class Coordinator:
    """Carries plans out for one job.  Everything it does happens in one task at a time."""

    def __init__(
        self,
        job: Job,
        placement: Placement,
        keeps_optimizer_preimages: bool,
        follow: Callable[[Session], None],
        note: Callable[[], None] = lambda: None,
        restorer: Restorer | None = None,
        decided: Callable[[], Awaitable[None]] = nobody_else,
        forget: Callable[[int, Collection[int]], None] = lambda oldest, ranks: None,
        timing: Timing = TIMING,
    ) -> None:
        """`follow` is told of every session that got a new server; `decided` is as in Round.

        `forget` is told the oldest generation of which a communicator may still be built, or lives, and which
        ranks go back.

        `note` writes down `corruption`, and what was done, for who follows if proxyd dies.
        """
        self._note = note
        self._forget = forget
        self._job = job
        self._placement = placement
        self._round = Round(job, placement, keeps_optimizer_preimages, follow, restorer, decided, timing)
        self._noticed = Noticed(job)
        self._known = 0
        """How many faults the round under way was planned for."""
        self._taken_back: tuple[int, frozenset[int]] = (0, frozenset())
        """Ranks that so many of them concern, in this recovery."""
        self._interrupt = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._tried: list[str] = []
        self._values = ReplayedValues(job)
        self._barrier = ValidationBarrier(job)

    @property
    def restoring(self) -> bool:
        """Whether ranks are on their way to a common commit: floors must not move."""
        return self._job.progress.steers

    def stands(self, session: Session) -> bool:
        """Whether its server stands still on purpose: at the end of a minibatch that is validated."""
        return session in self._barrier.sessions()

    @property
    def recovering(self) -> bool:
        """Whether a recovery, or a validation, is under way."""
        return self._task is not None

    @property
    def corruption(self) -> pb.JournaledCorruption | None:
        """The corruption that is being repaired, for who follows if proxyd dies."""
        return self._noticed.corruption

    def server_died(self, session: Session) -> None:
        """A session's server has died: nothing of it runs any more."""
        if session.server.retired or not session.active:
            return
        if (verdict := session.server.verdict) is not None:
            return self._notice(session, verdict.kind, verdict.happened_ns, verdict.noticed_ns,
                                verdict.evidence, counts=verdict.counts)  # fmt: skip
        gone = session.log.device_message if session.log.device_lost else ""
        if gone:
            self._placement.fence(session, gone)
        kind = FaultKind.DEVICE_GONE if gone else FaultKind.SERVER_DIED
        words = session.log.take_last_words()
        evidence = gone or (f"{ENDED}: {words}" if words else ENDED)
        self._notice(session, kind, session.log.progress_ns, session.server.process.ended_ns, evidence,
                     message=gone)  # fmt: skip

    def collective_failed(self, session: Session, generation: int, message: str, record_index: int) -> None:
        """A device server reported that a collective failed on it."""
        if generation != session.generation or not session.active:
            return
        if self.restoring and self._repairs(generation) and self._takes_back(session):
            return  # an echo
        now = time.monotonic_ns()
        self._notice(session, FaultKind.COLLECTIVE_FAILED, now, now, message, message, record_index)

    def _repairs(self, generation: int) -> bool:
        """Whether the recovery on its way replaces communicators of that generation anyway.

        One of what nobody broke may not come about: then what fails meanwhile is nobody's echo.
        """
        prepares = self._job.progress.stage is Stage.PREPARING and not self._noticed.nothing_broke
        return generation < self._job.generation or prepares

    def call_failed(
        self, session: Session, generation: int, suspect: bool, message: str, record_index: int
    ) -> None:
        """A device server reported that a call failed because of its driver; it stands at that record."""
        server = session.server
        if not session.active or generation < server.generation:
            return  # of a server that has been replaced
        if suspect:
            server.suspect = True
        elif record_index <= server.failed_at:
            session.lacks_state = True  # it did not get past its last failure: another server has to
        server.failed_at = record_index
        now = time.monotonic_ns()
        kind = FaultKind.DRIVER_SUSPECT if suspect else FaultKind.CALL_FAILED
        self._notice(session, kind, now, now, message, message, record_index)

    def collective_hung(self, session: Session, happened_ns: int, evidence: str, counts: bool) -> None:
        """The watch saw a collective that every member has begun and that does not end."""
        if self.restoring or not session.active:
            return
        self._notice(session, FaultKind.COLLECTIVE_HUNG, happened_ns, time.monotonic_ns(), evidence, evidence,
                     counts=counts)  # fmt: skip

    def corruption_found(self, session: Session, message: str, trusted: Mapping[int, int]) -> bool:
        """State that should equal its replicas does not; `trusted`: rank -> newest commit where it did.

        False: it cannot be repaired, as the job cannot go back, and training goes on with what there is.
        """
        fault = FaultFacts(FaultKind.SILENT_CORRUPTION, (session.rank,), message=message, trusted=trusted)
        facts = self._round.facts(fault)
        possible = plan(parked_anywhere(facts))
        if possible.name in ENDS:
            self._stays_corrupted(session, message, possible.reason)
            return False
        for rank in facts.ranks:  # replay comes past there again, and they would count
            if rank.rank in trusted:
                refuse_snapshots_behind(trusted[rank.rank], rank, self._job.sessions[rank.rank])
        self._noticed.trust(trusted)
        now = time.monotonic_ns()
        self._notice(session, FaultKind.SILENT_CORRUPTION, now, now, message, message, counts=False)
        self._note()
        return True

    def _stays_corrupted(self, session: Session, message: str, reason: str) -> None:
        log.error("corrupted state stays", job=self._job.name, rank=session.rank, difference=message,
                  reason=reason)  # fmt: skip
        session.note = f"corrupted, and not repaired: {message}; {reason}"

    async def _cannot_go_back(self) -> str:
        """Why all has to stay as it is, though nothing broke; ranks have gone on then.  Empty: they can.

        Since it was noticed or ordered a rank may have ended, or have begun a step out of which no way leads
        back.  Nobody ends any more, or begins one, once all are held: else those left would be given up.
        What somebody ordered holds nobody up until etcd, or a host that is cut off, is back.
        """
        if self._noticed.only_wishes and (waits := self._placement.awaited(self._concerned())):
            return f"nobody can be steered for the moment: {waits}"
        held = [session for session in self._concerned() if session.has_state]
        for session in held:
            session.state = "recovering"
        await hold(held, self._job.generation)
        possible = plan(parked_anywhere(self._round.facts(self._noticed.facts())))
        if possible.name not in ENDS or not self._noticed.nothing_broke:
            return ""
        for session in held:
            if session.state == "recovering":
                session.state = "running"
        await let_go([session for session in held if not self.stands(session)], self._job.generation)
        return possible.reason

    def _leave_as_it_is(self, reason: str) -> None:
        """What broke while the others were let go is a recovery of its own."""
        faults = self._noticed.faults
        left = [fault for fault in faults if fault.kind in SERVERS_SOUND]
        for fault in left:
            if (session := self._job.sessions.get(fault.rank)) is None:
                continue
            if fault.kind is FaultKind.SILENT_CORRUPTION:
                self._stays_corrupted(session, fault.message, reason)
            else:
                session.decline(reason)
        self._keep([fault for fault in faults if fault not in left])

    def rehearse_restore(self) -> str:
        """Take all ranks back to storage, though nothing is broken; or a sentence why that cannot be."""
        sessions = self._job.active_sessions()
        if self.recovering:
            return "a recovery is under way; try again once it is over"
        possible = plan(self._round.facts(FaultFacts(FaultKind.REHEARSAL, tuple(s.rank for s in sessions))))
        if possible.name in ENDS:
            return possible.reason
        if possible.name is not PlanName.RESTORE_STORED_REPLAY:
            return (
                "the logs reach back to no snapshot on storage (proxyd --persist-only keeps them that long)"
            )
        now = time.monotonic_ns()
        evidence = "recoveryctl snapshots restore"
        for session in sessions:
            self._notice(session, FaultKind.REHEARSAL, now, now, evidence, counts=False)
        return ""

    def way_to_move(self, session: Session) -> Plan:
        """The plan by which a rank gets to the device kept for it, if it is among those `replaced`."""
        fault = FaultFacts(FaultKind.PLANNED_MOVE, (session.rank,))
        return plan(parked_anywhere(self._round.facts(fault)))

    def move(self, session: Session) -> None:
        """Take a rank to the device that is kept for it, though nothing is broken."""
        now = time.monotonic_ns()
        evidence = f"an order to leave {session.device}"
        self._notice(session, FaultKind.PLANNED_MOVE, now, now, evidence, counts=False)

    def validation_reached(self, session: Session, generation: int) -> None:
        """A rank has executed the minibatch that is to be validated once, and stands at its end."""
        if not session.active or generation != session.generation:
            return
        self._barrier.add(session, generation)
        if self._task is None:
            self._start()

    def restart_refused(self, session: Session, generation: int, message: str, record_index: int) -> None:
        """Its server cannot go on from where it was restored: another way has to be found.

        It cannot be rolled through the step that it is in, or replay reads what others did not have any more.
        """
        if not session.active or generation < session.server.generation:
            return
        log.warning("a restored rank cannot go on", job=self._job.name, rank=session.rank, problem=message)
        if session.rolling:
            session.refused_commit = session.rolled_commit
            session.break_off_roll_forward()
            self._interrupt.set()  # a recovery lasts until its ranks are through
            return
        session.refused_commit = session.restored_commit
        session.lacks_state = True
        now = time.monotonic_ns()
        # It counts: a snapshot may lack that content, too, and then the third time is the last.
        self._notice(session, FaultKind.CALL_FAILED, now, now, message, message, record_index)

    def worker_left(self, session: Session) -> None:
        """A worker ended: whatever needs its rank has to be planned again.

        No plan contains a rank whose program has ended or failed: when many such workers leave at once, each
        would use up one of the rounds.
        """
        self._barrier.look_again()
        if self.restoring and session.log.session_state == 0:
            self._interrupt.set()

    def _takes_back(self, session: Session) -> bool:
        """Whether the faults known by now concern a rank.

        All ranks ask when a collective of theirs fails, and the answer takes the facts of all: once will do.
        """
        known = len(self._noticed.faults)
        if self._taken_back[0] != known or session.rank not in self._taken_back[1]:
            self._taken_back = known, frozenset(one.rank for one in self._concerned())
        return session.rank in self._taken_back[1]

    def _concerned(self) -> list[Session]:
        return self._round.concerned([fault.rank for fault in self._noticed.faults])[0]

    async def finish(self) -> None:
        """Wait for a recovery under way."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def cancel(self) -> None:
        """Stop recovering."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _notice(
        self, session: Session, kind: FaultKind, happened: int, noticed: int, evidence: str,
        message: str = "", record_index: int = -1, counts: bool = True,
    ) -> None:  # fmt: skip
        # A server that is being prepared runs no record.
        counts = counts and (kind in CALLS or not self.restoring)
        self._noticed.add(session, kind, happened, noticed, evidence,
                          message=message, record_index=record_index, counts=counts)  # fmt: skip
        self._interrupt.set()
        self._barrier.look_again()
        if self._task is None:
            self._start()

    def _start(self) -> None:
        self._job.progress.enter(Stage.PREPARING if self._noticed.faults else Stage.GATHERING)
        self._values.begin()
        self._taken_back = (0, frozenset())
        self._noticed.reach_as_far_as_now()
        self._task = asyncio.create_task(self._recover())
        self._task.add_done_callback(self._recovered)

    def _recovered(self, task: asyncio.Task[None]) -> None:
        self._task = None
        self._job.progress.end()
        if not task.cancelled() and task.exception() is not None:
            log.error("the recovery itself failed", job=self._job.name, exc_info=task.exception())
            for session in self._job.active_sessions():
                session.fail(f"Understudy failed to recover this job: {task.exception()}")
            self._noticed.keep([])
            self._barrier.forget()
        elif not task.cancelled() and (self._noticed.faults or self._barrier.sessions()):
            self._start()  # noticed when all was over

    async def _recover(self) -> None:
        async with self._job.opening:
            await self._deal_with_it()
        self._placement.fill()
        async with self._job.changed:
            self._job.changed.notify_all()

    async def _deal_with_it(self) -> None:
        possible = bool(self._noticed.faults) or await self._can_validate()
        self._job.progress.enter(Stage.PREPARING)
        if not possible:
            self._noticed.keep([])
            return await self._release()
        if self._noticed.faults and self._noticed.faults[0].kind is FaultKind.COLLECTIVE_FAILED:
            await self._await_explanation()
        if self._noticed.nothing_broke and (reason := await self._cannot_go_back()):
            return self._leave_as_it_is(reason)
        problem, pause, rounds = "", PEER_DEATH_WITHIN, 0
        result: Result | None = None
        while result is None and rounds < MOST_ROUNDS:
            try:
                result = await self._attempt(rounds + 1)
            except RoundFailed as failure:
                self._job.progress.enter(Stage.PREPARING)
                problem = str(failure)
                log.warning("recovery round failed", job=self._job.name, attempt=rounds + 1, problem=problem)
                for session in self._job.active_sessions():  # whoever wished to move it may try again
                    session.destination = None
                await self._interrupted(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            rounds += self._round.begun
        if result is None:
            self._abandon(problem)
        else:
            self._conclude(result)

    async def _attempt(self, attempt: int) -> Result | None:
        """One plan carried out and replayed to the point of the fault; None if another fault came between."""
        self._interrupt.clear()
        self._job.progress.enter(Stage.AWAITING)
        concerned, _ = self._round.concerned(self._noticed.facts().ranks)
        self._forget(self._job.oldest_generation(), [session.rank for session in concerned])
        self._job.generation += 1
        log.info("recovery round", job=self._job.name, attempt=attempt, generation=self._job.generation)
        work = asyncio.create_task(self._restore_and_replay())
        stop = asyncio.create_task(self._interrupt.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else None
        finally:
            for task in (work, stop):
                task.cancel()
            await asyncio.gather(work, stop, return_exceptions=True)

    async def _restore_and_replay(self) -> Result:
        self._known = len(self._noticed.faults)
        result = await self._round.run(self._noticed.facts(), self._tried)
        self._job.progress.enter(Stage.REPLAYING)
        await self._replayed()
        return result

    async def _replayed(self) -> None:
        """Until every rank is where it was, or cannot get there (its program failed or ended)."""
        pause = 0.001
        while any(
            session.active and not session.log.error_kind
            and (self._noticed.is_short_of_its_goal(session) or session.rolling)
            for session in self._job.active_sessions()
        ):  # fmt: skip
            if self._barrier.sessions():  # its new server does not know that it has been there before
                await self._release()
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    async def _can_validate(self) -> bool:
        """Whether all stand and can go back, or a fault came first: nobody is ended for a validation."""
        everybody = await self._barrier.everybody(lambda: bool(self._noticed.faults))
        if self._noticed.faults:
            return True
        # Training goes on without etcd; it must not stand still for a validation.
        waits = self._placement.awaited(self._job.active_sessions())
        return everybody and not waits and goes_back_a_minibatch(self._round.facts(self._noticed.facts()))

    async def _release(self) -> None:
        """Let ranks go on that stand at the end of a minibatch for a validation that does not come about."""
        for session, problem in await self._barrier.release():  # they would stand there for ever
            session.lacks_state = True
            now = time.monotonic_ns()
            self._notice(
                session, FaultKind.SERVER_HUNG, now, now, f"it did not resume: {problem}", counts=False
            )

    async def _await_explanation(self) -> None:
        """A collective fails because a peer died more often than not: give that notice time to arrive."""
        self._interrupt.clear()
        if (
            all(session.server.process.running for session in self._job.active_sessions())
            and not self._job.departed
        ):
            await self._interrupted(PEER_DEATH_WITHIN)

    async def _interrupted(self, timeout: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._interrupt.wait()

    def _conclude(self, result: Result) -> None:
        for session in self._job.sessions.values():  # also one whose program ended meanwhile
            if session.state == "recovering":
                session.state = "running"
        self._end_incident(
            self._known,
            result.plan.name,
            result.plan.reason,
            result.copied_bytes,
            [*result.ended_ns.values(), time.monotonic_ns()],
        )

    def _abandon(self, problem: str) -> None:
        reason = f"recovery did not succeed in {MOST_ROUNDS} rounds"
        reason += f", the last one because {problem}" if problem else ""
        for session in self._job.active_sessions():
            session.fail(reason)
        self._end_incident(len(self._noticed.faults), PlanName.GIVE_UP, reason, 0, [time.monotonic_ns()] * 4)

    def _keep(self, later: list[Fault]) -> None:
        self._noticed.keep(later)
        self._note()

    def _end_incident(
        self, known: int, plan_name: PlanName, reason: str, copied: int, marks: Sequence[int]
    ) -> None:
        """Tell of the first `known` faults.  Others came when their ranks were back and had gone on."""
        faults, later = self._noticed.faults[:known], self._noticed.faults[known:]
        compared, different = self._values.since()
        outcome = Outcome(
            plan_name, with_tried(reason, plan_name, self._tried), self._job.generation, copied, compared,
            different, marks, self._job.progress.seconds(),
        )  # fmt: skip
        told = told_of(faults)
        self._noticed.echoes_do_not_count(faults, told)
        for fault in told:
            entry = with_transfer(entry_of(fault, outcome), self._job)
            self._job.note_recovery(entry)
            log.info("recovery", job=self._job.name, id=entry.id, rank=fault.rank, plan=plan_name.value,
                     recovered=outcome.recovered, reason=outcome.reason,
                     total_s=round(entry.total_s, 6))  # fmt: skip
        self._values.judge(faults, outcome)
        self._tried, self._job.decision = [], None
        self._keep(later)
