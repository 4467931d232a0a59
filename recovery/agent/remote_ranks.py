"""What the agent does with ranks of other hosts, and with its own ones for the host that leads their job."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import structlog

from understudy.protos import control_pb2 as pb
from understudy.recovery.agent.beginning import is_cleaned_up
from understudy.recovery.agent.refusals import check_drills
from understudy.recovery.base.errors import Refused
from understudy.recovery.planning.takeover.notices import FaultNotice, notices_of
from understudy.recovery.state.jobs import Job, Session
from understudy.recovery.state.taking_over import keep_one_server, report_of

if TYPE_CHECKING:
    from understudy.recovery.agent.host_agent import HostAgent

log = structlog.get_logger()

LOOK_S = 0.1


class RemoteRanks:
    """Does it for the agent of one host."""

    def __init__(self, agent: HostAgent) -> None:
        self._agent = agent

    async def await_former(self, job: Job, rank: int, world: int, host: str) -> None:
        """Until a rank may open on another host; raises Refused."""
        check_drills(job, world)
        former = job.sessions.get(rank)
        if former is None:
            return
        where = f"on host {former.host}" if former.host else "on the host that leads the job"
        problem = f"a second process, on host {host}, says that it is rank {rank}, which runs {where}"
        if not await is_cleaned_up(former):
            raise Refused(problem)

    def next_validation(self, job: Job) -> int:
        """The minibatch that is to be executed twice; 0: none."""
        return self._agent.controllers[job.name].validations.step

    def take_remote(self, session: Session) -> None:
        """A rank of a job that we lead, which another host has opened."""
        job = session.job
        job.sessions[session.rank] = session
        job.departed.pop(session.rank, None)
        job.last_facts.pop(session.rank, None)
        job.note_armed(session)
        self._agent.run_beside(self._agent.follow_worker(session))
        self._agent.follow(session)
        log.info("session opened", job=job.name, rank=session.rank, host=session.host,
                 device=session.device, worker=session.worker.pid)  # fmt: skip

    def receive(self, session: Session) -> None:
        """A rank that came from another host, and is on its job's list."""
        session.job.departed.pop(session.rank, None)
        session.job.last_facts.pop(session.rank, None)
        self._agent.run_beside(self._agent.follow_worker(session))
        self._agent.note()
        log.info("a rank arrived", job=session.job.name, rank=session.rank, device=session.device,
                 worker=session.worker.pid)  # fmt: skip

    def moved_out(self, session: Session) -> None:
        """A rank of ours goes on elsewhere; who leads the job knows."""
        session.state = "ended"
        session.worker.ended.set()  # it may be that nobody has told us yet
        session.worker.close()
        self._agent.leases.release(session)
        if session.job.sessions.get(session.rank) is session:
            del session.job.sessions[session.rank]
        session.closed.set()
        self._agent.note()
        self.close_if_unused(session.job)

    def close_if_unused(self, job: Job) -> None:
        """If it has no rank here any more, nor what one has left to be copied from."""
        deputy = self._agent.deputies.get(job.name)
        behind = deputy is not None and bool(deputy.left_behind)
        if (
            job.foreign_relays
            and not job.sessions
            and job.name in self._agent.jobs
            and not job.closing
            and not behind
        ):
            self._agent.run_beside(self._close_quietly(job.name))

    def forget_foreign_relays(self, job: Job) -> None:
        """What its store has left; relays, and what they still have to tell, go by themselves."""
        if job.foreign_relays is None:
            return
        with contextlib.suppress(OSError):
            for path in job.foreign_relays.iterdir():
                if not path.is_dir():
                    path.unlink()
            job.foreign_relays.rmdir()
            job.foreign_relays.parent.rmdir()

    async def _close_quietly(self, name: str) -> None:
        with contextlib.suppress(Refused):
            await self._agent.close_job(name, "its last rank here has ended")

    def tell(self, report: pb.FaultReport) -> None:
        """A device server's, of this host or of another."""
        if (deputy := self._agent.deputies.get(report.job)) is not None:
            return deputy.tell(report)
        coordinator, job = self._agent.coordinators.get(report.job), self._agent.jobs.get(report.job)
        session = job.sessions.get(report.rank) if job is not None else None
        if coordinator is None or session is None:
            return
        generation, message, index = report.generation, report.message, report.record_index
        if report.kind in ("call", "suspect"):
            coordinator.call_failed(session, generation, report.kind == "suspect", message, index)
        elif report.kind == "validation":
            coordinator.validation_reached(session, generation)
        elif report.kind == "restart":
            coordinator.restart_refused(session, generation, message, index)
        else:
            coordinator.collective_failed(session, generation, message, index)

    def tell_all(self, job: Job, notices: Iterable[FaultNotice]) -> None:
        """What nobody else tells of ranks of a job that we have taken over."""
        for notice in notices:
            self.tell(report_of(notice, job.sessions[notice.rank]))

    async def promote(self, job: Job) -> None:
        """We lead it from now on, as its span says: ranks that a member has opened get a coordinator."""
        controller = self._agent.controllers[job.name]
        deputy = controller.deputy
        assert deputy is not None
        if job.corruption is not None:
            self._agent.run_beside(self.go_on_repairing(job))
        controller.lead()
        sessions = job.active_sessions()
        controller.validations.go_on(sessions)
        for session in sessions:
            job.note_armed(session)
            session.log.snapshot_suspended = False  # whoever suspended them finds out again why
            session.persist_note = ""
            keep_one_server(session, controller.retire)
            if session.rolling:  # who rolled it forward is gone
                session.lacks_state, session.rolled_commit = True, 0
            if not session.server.process.running:
                session.server.retired = False
                self._agent.follow(session)
        controller.succeed_leader()
        self.tell_all(job, notices_of(deputy.report(session) for session in sessions))
        deputy.parts.rest()
        await controller.end(deputy)

    async def go_on_repairing(self, job: Job) -> None:
        """What whoever led the job before us had found to be corrupted, once all ranks are known.

        No plan is made before: nobody else can tell any more which commits are right.  To be started before
        any fault is noticed.
        """
        async with job.opening:
            while job.span is not None and job.span.awaited and not job.closing:
                await asyncio.sleep(LOOK_S)
            found, job.corruption = job.corruption, None
            session = job.sessions.get(found.rank) if found is not None else None
            coordinator = self._agent.coordinators.get(job.name)
            if found is None or coordinator is None:
                return
            if session is None:
                log.error("corrupted state is not repaired: its rank is gone", job=job.name, rank=found.rank,
                          difference=found.message)  # fmt: skip
                return
            coordinator.corruption_found(session, found.message, dict(found.trusted))

    async def open_for_leader(self, job: Job, request: Any) -> Session:
        """Another host leads the job: no recovery begins there meanwhile."""
        spans = self._agent.controllers[job.name].spans
        begun = await spans.begin_rank(job, request.rank, request.world)
        job.generation = max(job.generation, begun.generation)
        self._agent.controllers[job.name].validations.expect(begun.validate_step)
        session = None
        try:
            session = await self._agent.open_here(job, request)
        finally:
            if session is None:
                with contextlib.suppress(Refused):  # the leader waits for so long, and no longer
                    await spans.end_rank(job, request.rank, None)
        self._agent.deputies[job.name].opened(session)
        try:
            await spans.end_rank(job, request.rank, session)
        except Refused as refusal:
            session.fail(str(refusal))
            self._agent.end_soon(session)
            raise
        return session
