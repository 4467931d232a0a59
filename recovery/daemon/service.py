"""proxyd's gRPC service: each request is handled in one short method."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from understudy.recovery.agent.host_agent import HostAgent
from understudy.recovery.base.background import to_its_end
from understudy.recovery.base.control import pb, rpc
from understudy.recovery.base.errors import BadInput, Refused
from understudy.recovery.base.timing import TIMING, Timing
from understudy.recovery.daemon.node import describe_node
from understudy.recovery.drills.fault_table import BY_NAME
from understudy.recovery.drills.refusals import FLAG, would_end
from understudy.recovery.drills.spec import Drill, unknown
from understudy.recovery.host.servers import ServerPool
from understudy.recovery.job_hosts.spans import Spans
from understudy.recovery.membership.membership import Membership
from understudy.recovery.membership.stores.store import ClusterStoreError
from understudy.recovery.migration.places import Place, parse_place
from understudy.recovery.migration.transfer.compatible import may_pass, refusal
from understudy.recovery.state.jobs import Job, Session
from understudy.recovery.upkeep.rehearsal import rehearse

log = structlog.get_logger()


class DaemonService(rpc.DaemonServicer):  # type: ignore[misc]
    """What workers, proxyrun, recoveryctl and device servers ask of proxyd."""

    def __init__(
        self,
        agent: HostAgent,
        pool: ServerPool,
        membership: Membership,
        spans: Spans,
        timing: Timing = TIMING,
    ) -> None:
        self._agent, self._timing = agent, timing
        self._spans = spans
        self._pool = pool
        self._membership = membership

    async def Describe(self, request: Any, context: Any) -> pb.Node:
        return self._node()

    async def OpenJob(self, request: Any, context: Any) -> pb.OpenJobReply:
        try:
            drills = [_drill(drill) for drill in request.drills]
            relays = await self._spans.open_job(request, drills)
        except Refused as refusal:
            return pb.OpenJobReply(error=str(refusal))
        return pb.OpenJobReply(relays=relays)

    async def CloseJob(self, request: Any, context: Any) -> pb.JobReport:
        try:
            return await self._agent.close_job(request.job)
        except Refused as refusal:
            return pb.JobReport(error=str(refusal))

    async def OpenSession(self, request: Any, context: Any) -> pb.Session:
        try:
            session = await to_its_end(self._agent.open_session(request))
        except Refused as refusal:
            log.warning("session refused", job=request.job, rank=request.rank, reason=str(refusal))
            if request.job in self._agent.jobs:
                self._agent.jobs[request.job].note_refused(str(refusal))
            return pb.Session(error=str(refusal))
        return pb.Session(
            log_directory=str(session.directory), capability=self._agent.installation.capability
        )

    async def GetStatus(self, request: Any, context: Any) -> pb.Status:
        sessions = [job.sessions[rank] for job in self._agent.jobs.values() for rank in sorted(job.sessions)]
        adoptions = [adoption for job in self._agent.jobs.values() for adoption in job.adoptions]
        return pb.Status(
            node=self._node(), ranks=[session.status() for session in sessions], adoptions=adoptions,
            jobs=[job.status() for job in self._agent.jobs.values()],
        )  # fmt: skip

    async def ReportFault(self, request: Any, context: Any) -> pb.FaultReply:
        self._agent.remote_ranks.tell(request)
        return pb.FaultReply()

    async def OrderDrill(self, request: Any, context: Any) -> pb.DrillReply:
        try:
            drill = _drill(request.drill)
            job = self._led_here(request.job)
            session = _running(job, drill)
            self._refuse_to_end(job, session, drill, may=request.may_end_the_job)
            return pb.DrillReply(detail=await self._agent.injector.run(job, session, drill))
        except Refused as refusal:
            return pb.DrillReply(error=str(refusal))

    def _refuse_to_end(self, job: Job, session: Session, drill: Drill, *, may: bool) -> None:
        """Raises Refused."""
        spans = job.span is not None and job.span.hosts > 1
        can_move = bool(self._agent.leases.free()) or spans
        how = "" if may else would_end(drill.kind, device=session.device, can_move=can_move)
        if how:
            raise Refused(f"{drill.kind} would end job {job.name}: {how}; {FLAG} orders it all the same")

    async def RehearseRestore(self, request: Any, context: Any) -> pb.DrillReply:
        try:
            job = self._led_here(request.job)
            coordinator = self._agent.coordinators[job.name]
            return pb.DrillReply(detail=await rehearse(job, coordinator))
        except Refused as refusal:
            return pb.DrillReply(error=str(refusal))

    async def MoveWorker(self, request: Any, context: Any) -> pb.DrillReply:
        try:
            job = self._the_job(request.job)
            session = job.sessions.get(request.rank)
            if session is None or not session.active:
                raise Refused(f"job {job.name} has no running rank {request.rank}")
            if request.to:
                self._led_here(job.name)
                work = self._agent.planned.migrate(session, await self._place(request.to))
            elif session.host or job.name in self._agent.deputies:
                raise Refused(
                    f"rank {session.rank} is of a job on several hosts: its worker goes --to another one, "
                    "and not in place"
                )
            else:
                work = self._agent.move_worker(session, request.criu, request.images)
            return pb.DrillReply(detail=await to_its_end(work))
        except (Refused, BadInput) as refusal:
            return pb.DrillReply(error=str(refusal))

    async def DrainDevice(self, request: Any, context: Any) -> pb.DrillReply:
        try:
            place = await self._place(request.place)
            if request.undo:
                return pb.DrillReply(detail=self._agent.planned.undo(place))
            return pb.DrillReply(detail=await to_its_end(self._agent.planned.drain(place)))
        except (Refused, BadInput) as refusal:
            return pb.DrillReply(error=str(refusal))

    async def _place(self, text: str) -> Place:
        """Raises BadInput, or Refused where another host is of no use."""
        place = parse_place(text)
        if place.host in ("", self._membership.here):
            return place
        deadline = asyncio.get_running_loop().time() + self._timing.place_within_s
        while reason := refusal(place, hosts := await self._membership.listing()):
            if not may_pass(place, hosts) or asyncio.get_running_loop().time() > deadline:
                raise Refused(f"nothing can go to {place}: {reason}")
            await asyncio.sleep(self._timing.place_again_s)
        return place

    async def ListHosts(self, request: Any, context: Any) -> pb.HostList:
        return await self._membership.listing()

    async def ForgetHost(self, request: Any, context: Any) -> pb.DrillReply:
        try:
            problem = await self._membership.hosts.forget(request.name)
        except ClusterStoreError as trouble_of_store:
            problem = str(trouble_of_store)
        return pb.DrillReply(error=problem, detail=f"host {request.name} is forgotten")

    def _node(self) -> pb.Node:
        agent = self._agent
        node = describe_node(agent.settings, agent.installation, agent.leases, self._pool)
        node.membership.CopyFrom(self._membership.status())
        return node

    def _led_here(self, name: str) -> Job:
        job = self._the_job(name)
        if job.name in self._agent.deputies and job.span is not None:
            raise Refused(f"host {job.span.leader} leads job {job.name}: ask its proxyd")
        return job

    def _the_job(self, name: str) -> Job:
        jobs = self._agent.jobs
        if name:
            if name not in jobs:
                raise Refused(f"there is no job {name}" + (f"; there are: {', '.join(jobs)}" if jobs else ""))
            return jobs[name]
        if len(jobs) != 1:
            raise Refused(
                f"several jobs run, name one with --job: {', '.join(jobs)}" if jobs else "no job runs"
            )
        return next(iter(jobs.values()))


def _drill(message: Any) -> Drill:
    if message.kind not in BY_NAME:
        raise Refused(unknown(message.kind))
    if message.rank < 0 or (message.step > 0) != (message.call > 0):
        raise Refused("a drill needs a rank, and step and call both from 1 or neither")
    return Drill(message.kind, message.rank, message.step, message.call)


def _running(job: Job, drill: Drill) -> Session:
    """The session that a drill strikes; raises Refused with what can be struck."""
    running = job.active_sessions()
    named = ", ".join(str(session.rank) for session in running)
    session = job.sessions.get(drill.rank)
    if session is None or not session.active:
        raise Refused(f"job {job.name} has no running rank {drill.rank}; running: {named or 'none'}")
    step, call = session.log.step, session.log.call
    if drill.step and (drill.step, drill.call) <= (step, call):
        raise Refused(
            f"rank {drill.rank} has come to step {step}, call {call} already: step {drill.step}, call "
            f"{drill.call} is past; name a step from {step + 1} on, or none for now"
        )
    return session
