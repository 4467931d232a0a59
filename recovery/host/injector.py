"""Carries out ordered drills: what a device server cannot do to itself, and the account of what followed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable

import structlog

from understudy import replay
from understudy.protos import control_pb2 as pb
from understudy.recovery.base.errors import Refused
from understudy.recovery.drills.fault_table import BY_NAME, FAULTS, InjectedFault
from understudy.recovery.drills.spec import Drill
from understudy.recovery.host.servers import ServerPool
from understudy.recovery.state.counts import ScheduledDrill
from understudy.recovery.state.jobs import DRILL_FIRED, Job, Session

log = structlog.get_logger()

LOOK_S = 0.01
SETTLED_S = 1.0
"""How long a fault without recovery is observed before its account is given."""


class Injector:
    """Does the faults that only proxyd can."""

    def __init__(self, pool: ServerPool) -> None:
        self._pool = pool
        self._acts: dict[str, Callable[[Job, Session], str]] = {
            "kill-server": _kill_server,
            "stop-server": _stop_server,
            "kill-spare": self._kill_spare,
            "kill-all-servers": _kill_all_servers,
            "kill-proxyd": _kill_proxyd,
            "kill-worker": _kill_worker,
        }
        assert {fault.name for fault in FAULTS if fault.by_proxyd} <= self._acts.keys()

    async def run(self, job: Job, session: Session, drill: Drill) -> str:
        """Order a drill, wait until what it caused is over, and tell.  Raises Refused."""
        before = len(job.recoveries)
        fault = BY_NAME[drill.kind]
        scheduled = ScheduledDrill(drill)
        done = ""
        log.warning("drill", job=job.name, kind=drill.kind, rank=drill.rank, step=drill.step)
        if drill.step or fault.name not in self._acts:
            try:
                job.put(session, scheduled)
            except replay.LogError as problem:
                raise Refused(str(problem)) from problem
            job.drills.append(scheduled)
        else:
            job.note_done(scheduled, session)
            job.drills.append(scheduled)
            if fault.name == "kill-proxyd":  # nobody will come back to say so
                job.history.settle(SETTLED_S)
            done = self._acts[fault.name](job, session)
        if fault.noticed_as is None:
            return done or await self._observed(job, session, scheduled)
        return await _recovered(job, session, fault, drill, before)

    def act_on_fired(self, job: Job) -> None:
        """Do our part of scheduled drills whose record has been reached, and take note of the others."""
        for scheduled in job.drills:
            session = job.sessions.get(scheduled.drill.rank)
            if scheduled.fired or scheduled.slot < 0 or session is None or not session.active:
                continue
            fault = BY_NAME[scheduled.drill.kind]
            if not (fault.by_proxyd and _is_ours(fault.name, job, session)):
                job.note_fired(session)
            elif session.log.drills()[scheduled.slot][3] == DRILL_FIRED:
                if fault.name == "kill-proxyd":  # nobody will come back to say so; who adopts takes note
                    scheduled.fired = True
                    session.log.drill_done(scheduled.slot)
                job.note_done(scheduled, session)
                scheduled.account = self._acts[fault.name](job, session)
                session.log.drill_done(scheduled.slot)

    async def _observed(self, job: Job, session: Session, scheduled: ScheduledDrill) -> str:
        """What is known of a fault without recovery once it has fired."""
        while session.active and session.log.drills()[scheduled.slot][3] == 0:
            await asyncio.sleep(LOOK_S)  # waits for shared memory, which has no event here
        if not session.active:
            raise Refused(f"rank {session.rank} ended before the drill ({scheduled.drill}) was over")
        step, call = session.log.step, session.log.call
        detail = session.log.drills()[scheduled.slot][5]
        await asyncio.sleep(SETTLED_S)
        fault = BY_NAME[scheduled.drill.kind]
        where = f"rank {session.rank} in step {step}, call {call}"
        account = scheduled.account or fault.does
        if fault.name == "bit-flip":
            account = f"one bit of buffer {detail} changed" if detail else "there was no state to change"
        return f"{fault.name} ({where}): {account}; noticed by: {fault.noticed_by}; then: {fault.then}"

    def _kill_spare(self, job: Job, session: Session) -> str:
        spare = self._pool.a_spare(session.device)
        if spare is None:
            return "kill-spare: there was no warm spare to kill"
        spare.process.send(signal.SIGKILL)
        return f"kill-spare: the warm spare {spare.pid} was killed; another is being started"


def _is_ours(fault: str, job: Job, session: Session) -> bool:
    """Whether our part of it is to be done here: every host of a job sees its ranks' drills fire.

    Who leads the job has all its servers killed; what concerns one host, the rank's own does.
    """
    if fault == "kill-all-servers":
        return job.span is None or not job.span.leader
    return not session.host


def _kill_server(job: Job, session: Session) -> str:
    session.killed_ns = time.monotonic_ns()
    session.server.process.send(signal.SIGKILL)
    return ""


def _stop_server(job: Job, session: Session) -> str:
    session.server.process.send(signal.SIGSTOP)
    return ""


def _kill_all_servers(job: Job, session: Session) -> str:
    for other in job.active_sessions():
        _kill_server(job, other)
    return ""


def _kill_proxyd(job: Job, session: Session) -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


def _kill_worker(job: Job, session: Session) -> str:
    session.worker.send(signal.SIGKILL)
    return f"kill-worker: the worker {session.worker.pid} of rank {session.rank} was killed; its session ends"


async def _recovered(job: Job, session: Session, fault: InjectedFault, drill: Drill, before: int) -> str:
    def outcome() -> pb.Recovery | None:
        """What followed is noticed on the rank itself or, if it concerns a collective, on any member."""
        new = job.recoveries[before:]
        kind = fault.noticed_as
        assert kind is not None
        mine = (done for done in new if done.rank == drill.rank)
        return next(mine, next((done for done in new if done.fault == kind.value), None))

    async with job.changed:
        await job.changed.wait_for(lambda: outcome() is not None or session.closed.is_set())
    done = outcome()
    if done is None:
        raise Refused(f"rank {drill.rank} ended before the drill ({drill}) was over")
    return account_of(done)


def account_of(done: pb.Recovery) -> str:
    """A recovery in words: what was noticed, what was decided and why, how long it took, what was checked."""
    where = f"rank {done.rank} in step {done.step}, call {done.call}, {done.phase}"
    called = f"\n  recovery: {done.id} (recoveryctl history)" if done.id else ""
    if not done.recovered:
        return f"{done.fault} ({where}): {done.plan}: {done.reason}\n  noticed: {done.evidence}{called}"
    went = ""
    if done.HasField("transfer"):
        by = done.transfer
        went = (
            f"\n  went: from host {by.source} to {by.destination} in {by.total_s:.3f} s of the restart: dump "
            f"{by.dump_s:.3f}, ship {by.ship_s:.3f} ({by.bytes / 1e6:.0f} MB), restore {by.restore_s:.3f}, "
            f"switch {by.switch_s:.3f}"
        )
    return (
        f"{done.fault} ({where}): {done.plan} in {done.total_s:.3f} s: detect {done.detect_s:.3f}, "
        f"restart {done.restart_s:.3f}, copy {done.copy_s:.3f}, communicators {done.communicators_s:.3f}, "
        f"replay {done.replay_s:.3f}{went}\n  noticed: {done.evidence}\n  why: {done.reason}\n"
        f"  verified: {done.verified}{called}"
    )
