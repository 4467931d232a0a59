"""Recovery of one job: from the notice of a fault to ranks that have replayed past it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from recovery.control import pb
from recovery.facts import FaultFacts, FaultKind, Phase
from recovery.jobs import Job, Session
from recovery.planner import PlanName
from recovery.recovery_round import Result, Round, RoundFailed
from recovery.servers import ServerPool

log = structlog.get_logger()

MOST_ROUNDS = 8
"""Plans tried for one incident before giving up."""
PEER_DEATH_WITHIN = 0.25
"""Seconds a failed collective waits for the notice of a death that explains it."""


@dataclass(frozen=True)
class Fault:
    """What was noticed, where the rank stood, and since when."""

    kind: FaultKind
    rank: int
    step: int
    call: int
    phase: Phase
    record_index: int
    message: str
    happened_ns: int
    noticed_ns: int
    drill: bool


class Coordinator:
    """Carries plans out for one job.  Everything it does happens in one task at a time."""

    def __init__(
        self, job: Job, pool: ServerPool, keeps_optimizer_preimages: bool, follow: Callable[[Session], None]
    ) -> None:
        """`follow` is told of every session that got a new server."""
        self._job = job
        self._pool = pool
        self._follow = follow
        self._keeps_optimizer_preimages = keeps_optimizer_preimages
        self._faults: list[Fault] = []
        self._interrupt = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failures: dict[int, tuple[int, int]] = {}
        self._reach: dict[int, int] = {}
        self._replaying = False

    @property
    def restoring(self) -> bool:
        """Whether ranks are on their way to a common commit: floors must not move."""
        return self._task is not None and not self._replaying

    def server_died(self, session: Session) -> None:
        """The pidfd of a session's server became readable."""
        if session.server.retired or not session.active:
            return
        noticed = session.server.process.ended_ns
        happened, step, call, drill = _death(session)
        self._notice(session, FaultKind.SERVER_DIED, step, call, "", happened, noticed, drill)

    def collective_failed(self, session: Session, generation: int, message: str, record_index: int) -> None:
        """A device server reported that a collective failed on it."""
        if generation != self._job.generation or self.restoring or not session.active:
            return  # an echo of what is being repaired
        now = time.monotonic_ns()
        self._notice(
            session, FaultKind.COLLECTIVE_FAILED, session.log.step, session.log.call, message, now, now,
            False, record_index,
        )  # fmt: skip

    def worker_left(self, session: Session) -> None:
        """A worker ended: whatever needs its rank has to be planned again."""
        if self._task is not None and not self._replaying:
            self._interrupt.set()

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
        self, session: Session, kind: FaultKind, step: int, call: int, message: str, happened: int,
        noticed: int, drill: bool, record_index: int = -1,
    ) -> None:  # fmt: skip
        index = session.log.cursor_index if record_index < 0 else record_index
        fault = Fault(kind, session.rank, step, call, session.phase, index, message, happened, noticed, drill)
        log.warning(
            "fault", job=self._job.name, kind=kind.value, rank=fault.rank, step=step, call=call, record=index,
            phase=fault.phase.value, drill=drill, message=message,
        )  # fmt: skip
        if not drill:
            last, count = self._failures.get(fault.rank, (-1, 0))
            self._failures[fault.rank] = (index, count + 1 if last == index else 1)
        self._faults.append(fault)
        self._interrupt.set()
        if self._task is None:
            for other in self._job.active_sessions():
                self._reach[other.rank] = max(self._reach.get(other.rank, 0), other.log.cursor_index)
            self._task = asyncio.create_task(self._recover())
            self._task.add_done_callback(self._recovered)

    def _recovered(self, task: asyncio.Task[None]) -> None:
        self._task = None
        self._replaying = False
        if not task.cancelled() and task.exception() is not None:
            log.error("the recovery itself failed", job=self._job.name, exc_info=task.exception())
            for session in self._job.active_sessions():
                session.lose(f"Understudy failed to recover this job: {task.exception()}")

    async def _recover(self) -> None:
        async with self._job.opening:
            if self._faults[0].kind is FaultKind.COLLECTIVE_FAILED:
                await self._await_explanation()
            problem = ""
            result: Result | None = None
            for attempt in range(1, MOST_ROUNDS + 1):
                try:
                    result = await self._round(attempt)
                except RoundFailed as failure:
                    problem = str(failure)
                    log.warning("recovery round failed", job=self._job.name, attempt=attempt, problem=problem)
                    await self._interrupted(PEER_DEATH_WITHIN)
                    result = None
                if result is not None:
                    break
            if result is None:
                self._abandon(problem)
            else:
                self._conclude(result)
        self._pool.fill()
        async with self._job.changed:
            self._job.changed.notify_all()

    async def _round(self, attempt: int) -> Result | None:
        """One plan carried out and replayed to the point of the fault; None if another fault came between."""
        self._interrupt.clear()
        self._replaying = False
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
        round_ = Round(self._job, self._pool, self._keeps_optimizer_preimages, self._follow)
        result = await round_.run(self._fault_facts())
        self._replaying = True
        if result.plan.name is not PlanName.GIVE_UP:
            await self._replayed()
        return result

    def _fault_facts(self) -> FaultFacts:
        worst = max(self._faults, key=lambda fault: self._attempts(fault))
        attempts = self._attempts(worst)
        message = worst.message
        if not message and attempts > 1:
            message = (
                f"the device server of rank {worst.rank} died {attempts} times at record {worst.record_index}"
            )
        ranks = tuple(sorted({fault.rank for fault in self._faults}))
        return FaultFacts(self._faults[0].kind, ranks, worst.phase, attempts, message)

    def _attempts(self, fault: Fault) -> int:
        index, count = self._failures.get(fault.rank, (-1, 0))
        return count if index == fault.record_index and not fault.drill else 1

    async def _replayed(self) -> None:
        """Until every rank is where it was, or cannot get there (its program failed or ended)."""
        pause = 0.001
        while any(
            session.active and not session.log.error_kind
            and session.log.cursor_index < self._reach.get(session.rank, 0)
            for session in self._job.active_sessions()
        ):  # fmt: skip
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    async def _await_explanation(self) -> None:
        """A collective fails because a peer died more often than not: give that notice time to arrive."""
        self._interrupt.clear()
        if (
            all(session.server.process.running for session in self._job.active_sessions())
            and not self._job.departed
        ):
            await self._interrupted(PEER_DEATH_WITHIN)

    async def _interrupted(self, timeout: float) -> None:
        try:
            await asyncio.wait_for(self._interrupt.wait(), timeout)
        except TimeoutError:
            return

    def _conclude(self, result: Result) -> None:
        now = time.monotonic_ns()
        recovered = result.plan.name is not PlanName.GIVE_UP
        for session in self._job.active_sessions():
            session.state = "running"
        self._record(
            self._faults, result.plan.name.value, result.plan.reason, recovered, result.copied_bytes,
            (result.attached_ns, result.restored_ns, result.resumed_ns, now),
        )  # fmt: skip

    def _abandon(self, problem: str) -> None:
        reason = f"recovery did not succeed in {MOST_ROUNDS} rounds"
        reason += f", the last one because {problem}" if problem else ""
        for session in self._job.active_sessions():
            session.lose(reason)
        now = time.monotonic_ns()
        self._record(self._faults, PlanName.GIVE_UP.value, reason, False, 0, (now, now, now, now))

    def _record(
        self,
        faults: Sequence[Fault],
        plan: str,
        reason: str,
        recovered: bool,
        copied: int,
        marks: Sequence[int],
    ) -> None:
        """One entry per fault.  Faults of one incident share what was done; each has its own notice.

        A collective that failed because a peer's server died is that death's echo, not a fault of its own.
        """
        deaths = [fault for fault in faults if fault.kind is FaultKind.SERVER_DIED]
        for fault in deaths or faults:
            points = [max(mark, fault.noticed_ns) for mark in marks]
            spans = [
                (end - start) / 1e9 for start, end in zip([fault.noticed_ns, *points], points, strict=False)
            ]
            self._job.recoveries.append(
                pb.Recovery(
                    fault=fault.kind.value, rank=fault.rank, step=fault.step, call=fault.call,
                    phase=fault.phase.value, plan=plan, reason=reason,
                    detect_s=max(0, fault.noticed_ns - fault.happened_ns) / 1e9,
                    restart_s=spans[0], copy_s=spans[1], communicators_s=spans[2], replay_s=spans[3],
                    total_s=max(0, points[-1] - fault.happened_ns) / 1e9,
                    generation=self._job.generation, copied_bytes=copied, recovered=recovered,
                )
            )  # fmt: skip
            log.info("recovery", job=self._job.name, rank=fault.rank, plan=plan, recovered=recovered,
                     reason=reason, total_s=round(self._job.recoveries[-1].total_s, 6))  # fmt: skip
        self._faults = []
        self._reach = {}


def _death(session: Session) -> tuple[int, int, int, bool]:
    """When and where a server died: (CLOCK_MONOTONIC ns, step, call, whether a drill did it).

    A drill notes the moment; otherwise the server's last progress is an upper bound for the time to detect.
    """
    fired = [mark for mark in session.log.drills() if mark[3]]
    if len(fired) > session.drills_seen:
        session.drills_seen = len(fired)
        _, step, call, _, at_ns = max(fired, key=lambda mark: mark[4])
        return at_ns, step, call, True
    if session.killed_ns:
        at_ns, session.killed_ns = session.killed_ns, 0
        return at_ns, session.log.step, session.log.call, True
    return session.log.progress_ns, session.log.step, session.log.call, False
