"""proxyd's gRPC service: each request is handled in one short method."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import structlog

from recovery.control import pb, rpc
from recovery.drills import KINDS, Drill
from recovery.jobs import Job, ScheduledDrill, Session
from recovery.servers import ServerPool
from recovery.sessions import Desk, Refused

log = structlog.get_logger()


class DaemonService(rpc.DaemonServicer):  # type: ignore[misc]
    """What workers, proxyrun, recoveryctl and device servers ask of proxyd."""

    def __init__(self, desk: Desk, pool: ServerPool) -> None:
        self._desk = desk
        self._pool = pool

    async def Describe(self, request: Any, context: Any) -> pb.Node:
        return self._node()

    async def OpenJob(self, request: Any, context: Any) -> pb.OpenJobReply:
        try:
            drills = [_drill(drill) for drill in request.drills]
            self._desk.open_job(request.job, drills, request.launcher_pid)
        except Refused as refusal:
            return pb.OpenJobReply(error=str(refusal))
        return pb.OpenJobReply()

    async def CloseJob(self, request: Any, context: Any) -> pb.JobReport:
        try:
            return await self._desk.close_job(request.job)
        except Refused as refusal:
            return pb.JobReport(error=str(refusal))

    async def OpenSession(self, request: Any, context: Any) -> pb.Session:
        try:
            session = await asyncio.shield(self._desk.open_session(request))
        except Refused as refusal:
            log.warning("session refused", job=request.job, rank=request.rank, reason=str(refusal))
            return pb.Session(error=str(refusal))
        return pb.Session(log_directory=str(session.directory), capability=self._desk.installation.capability)

    async def GetStatus(self, request: Any, context: Any) -> pb.Status:
        sessions = [job.sessions[rank] for job in self._desk.jobs.values() for rank in sorted(job.sessions)]
        return pb.Status(node=self._node(), ranks=[session.status() for session in sessions])

    async def ReportFault(self, request: Any, context: Any) -> pb.FaultReply:
        coordinator = self._desk.coordinators.get(request.job)
        job = self._desk.jobs.get(request.job)
        session = job.sessions.get(request.rank) if job else None
        if coordinator is not None and session is not None:
            coordinator.collective_failed(session, request.generation, request.message, request.record_index)
        return pb.FaultReply()

    async def OrderDrill(self, request: Any, context: Any) -> pb.DrillReply:
        try:
            drill = _drill(request.drill)
            job = self._the_job(request.job)
            session = job.sessions.get(drill.rank)
            if session is None or not session.active:
                raise Refused(f"job {job.name} has no running rank {drill.rank}")
            return pb.DrillReply(detail=await self._run_drill(job, session, drill))
        except Refused as refusal:
            return pb.DrillReply(error=str(refusal))

    async def _run_drill(self, job: Job, session: Session, drill: Drill) -> str:
        """Order it and wait until what it caused is over."""
        before = len(job.recoveries)
        if drill.step:
            scheduled = ScheduledDrill(drill)
            job.drills.append(scheduled)
            scheduled.slot = len(session.log.drills())
            session.log.add_drill(KINDS[drill.kind], drill.step, drill.call)
        else:
            log.warning("drill", job=job.name, kind=drill.kind, rank=drill.rank)
            session.killed_ns = time.monotonic_ns()
            session.server.process.send(signal.SIGKILL)
            job.drills.append(ScheduledDrill(drill, fired=True))

        def outcome() -> pb.Recovery | None:
            return next((done for done in job.recoveries[before:] if done.rank == drill.rank), None)

        async with job.changed:
            await job.changed.wait_for(lambda: outcome() is not None or session.closed.is_set())
        done = outcome()
        if done is None:
            raise Refused(f"rank {drill.rank} ended before the drill ({drill}) was over")
        return _split(done)

    def _the_job(self, name: str) -> Job:
        jobs = self._desk.jobs
        if name:
            if name not in jobs:
                raise Refused(f"there is no job {name}" + (f"; there are: {', '.join(jobs)}" if jobs else ""))
            return jobs[name]
        if len(jobs) != 1:
            raise Refused(
                f"several jobs run, name one with --job: {', '.join(jobs)}" if jobs else "no job runs"
            )
        return next(iter(jobs.values()))

    def _node(self) -> pb.Node:
        names = self._desk.settings.devices.names
        return pb.Node(
            torch_version=self._desk.installation.torch_version,
            pid=os.getpid(),
            devices=[self._device(index, name) for index, name in enumerate(names)],
            capability=self._desk.installation.capability,
            spares=self._pool.spares(),
        )

    def _device(self, index: int, name: str) -> pb.Device:
        driver = self._desk.settings.devices.kind
        holder = self._desk.holder(index)
        if holder is None:
            state = "failed" if self._pool.broken else "idle" if self._pool.ready() else "starting"
            return pb.Device(spec=name, index=index, state=state, rank=-1, driver=driver)
        state = "recovering" if holder.state == "recovering" else "leased"
        return pb.Device(
            spec=name, index=index, state=state, server_pid=holder.server.pid, job=holder.job.name,
            rank=holder.rank, driver=driver,
        )  # fmt: skip


def _drill(message: Any) -> Drill:
    if message.kind not in KINDS:
        raise Refused(f"unknown drill {message.kind!r} (there is: {', '.join(KINDS)})")
    if message.rank < 0 or (message.step > 0) != (message.call > 0):
        raise Refused("a drill needs a rank, and step and call both from 1 or neither")
    return Drill(message.kind, message.rank, message.step, message.call)


def _split(done: Any) -> str:
    where = f"rank {done.rank} in step {done.step}, call {done.call}, {done.phase}"
    if not done.recovered:
        return f"{done.fault} ({where}): {done.plan}: {done.reason}"
    return (
        f"{done.fault} ({where}): {done.plan} in {done.total_s:.3f} s: detect {done.detect_s:.3f}, "
        f"restart {done.restart_s:.3f}, copy {done.copy_s:.3f}, communicators {done.communicators_s:.3f}, "
        f"replay {done.replay_s:.3f}"
    )
