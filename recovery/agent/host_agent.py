"""Opens and ends sessions: leases devices, makes logs, follows workers and their servers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from understudy import replay
from understudy.protos import control_pb2 as pb
from understudy.recovery.agent.beginning import attach, former_gone, make_log
from understudy.recovery.agent.job_controller import HostServices, JobController
from understudy.recovery.agent.open_jobs import OpenJobs
from understudy.recovery.agent.refusals import (
    check_drills,
    check_nccl,
    check_that_logs_can_move,
    check_version,
    held,
    more_ranks_than_devices,
)
from understudy.recovery.agent.remote_ranks import RemoteRanks
from understudy.recovery.agent_api.server import Server
from understudy.recovery.base.background import BackgroundTasks, first_of
from understudy.recovery.base.errors import Refused
from understudy.recovery.base.job_names import trouble_with
from understudy.recovery.config.settings import Settings
from understudy.recovery.drills.spec import Drill
from understudy.recovery.history.events import job_started, worker_moved
from understudy.recovery.history.recorder import Recorder
from understudy.recovery.host.early_notice import EarlyNotice
from understudy.recovery.host.evidence import rank_facts
from understudy.recovery.host.injector import Injector
from understudy.recovery.host.leases import Leases
from understudy.recovery.host.servers import ServerPool
from understudy.recovery.host.spawner import Installation, SpawnerError
from understudy.recovery.machine.processes import Watched
from understudy.recovery.machine.runtime_directory import RuntimeDirectory
from understudy.recovery.migration.mover import move_worker
from understudy.recovery.migration.preflight.survey import Survey
from understudy.recovery.migration.process.namespaces import pid_here
from understudy.recovery.rendezvous.store import Store
from understudy.recovery.spanning.interface import JobSpans
from understudy.recovery.state.counts import ScheduledDrill
from understudy.recovery.state.jobs import SESSION_CLOSED, Job, Session
from understudy.recovery.state.span import Span
from understudy.recovery.upkeep.planned_moves import PlannedMoves
from understudy.recovery.upkeep.watch import Watch

log = structlog.get_logger()

LEAVE_WITHIN = 5.0
"""Seconds workers get to end by themselves when their launcher is gone."""
LOOK_S = 0.5
"""Between two looks at whether a job whose launcher has ended goes on, if nobody tells."""


@dataclass(frozen=True)
class Told:
    """Who is told of what the agent does."""

    history: Recorder
    note: Callable[[], None]
    """Called before what has changed has consequences: the journal must know."""
    closed: Callable[[Job], None]
    """Of every job that is over."""


class HostAgent:
    """Everything that is open on this node."""

    def __init__(
        self,
        settings: Settings,
        runtime: RuntimeDirectory,
        pool: ServerPool,
        leases: Leases,
        installation: Installation,
        store: Store,
        open_jobs: OpenJobs,
        told: Told,
    ) -> None:
        self.settings = settings
        self.installation = installation
        self.controllers, self.jobs = open_jobs.controllers, open_jobs.jobs
        self.coordinators, self.deputies = open_jobs.coordinators, open_jobs.deputies
        self.worker_stores = open_jobs.worker_stores
        self.remote_ranks = RemoteRanks(self)
        self.runtime = runtime
        self._pool = pool
        self._store = store
        self.leases = leases
        self._background = BackgroundTasks("sessions", settings.timing)
        self._lingering: set[str] = set()
        """Jobs whose launcher has ended, and which go on with ranks of others."""
        self._closings: dict[str, asyncio.Task[pb.JobReport]] = {}
        self.history, self.note, self._tell_closed = told.history, told.note, told.closed
        self.injector = Injector(pool)
        self.planned = PlannedMoves(
            settings, leases, pool, self.coordinators, open_jobs.snapshots, open_jobs.spans, self.note
        )
        self._services = HostServices(settings, pool, leases, store, self.follow, self.note)
        self._early_notice = EarlyNotice()
        self.watch = Watch(
            self.jobs, self.coordinators, self.deputies, self.injector, settings.hang_timeout_s
        )
        self._background.start(self.watch.run())
        self._background.start(Survey(self.jobs).run())
        self._background.start(leases.health.run(leases.tell_pool))

    def run_beside(self, work: Coroutine[None, None, None]) -> None:
        """As long as this proxyd runs."""
        self._background.start(work)

    # ------------------------------------------------------------------ jobs
    def open_job(
        self,
        name: str,
        drills: list[Drill],
        launcher_pid: int,
        migratable: bool,
        span: Span | None,
        spans: JobSpans,
    ) -> str:
        """Answers the directory of its relays, if it is migratable; raises Refused."""
        if trouble := trouble_with(name):
            raise Refused(f"job {trouble}")
        if migratable:
            check_that_logs_can_move(self.settings.log_directory)
        relays = str(self.runtime.relays(name)) if migratable else ""
        if name in self.jobs:
            if self.jobs[name].adopted_from(launcher_pid):
                return relays  # the answer of the proxyd that died did not reach it
            raise Refused(f"there is a job {name} already")
        launcher: Watched | None = None
        if launcher_pid:
            try:
                launcher = Watched(launcher_pid)
            except ProcessLookupError:
                raise Refused(f"the launcher of job {name} (pid {launcher_pid}) has ended already") from None
        if relays:
            os.makedirs(relays, mode=0o700, exist_ok=True)
        scheduled = [ScheduledDrill(drill) for drill in drills]
        self.begin(Job(name, launcher, scheduled, span=span, history=self.history), spans)
        self.note()
        log.info("job opened", job=name, launcher=launcher_pid, drills=[str(drill) for drill in drills])
        return relays

    def begin(self, job: Job, spans: JobSpans) -> None:
        """A job that is not open here yet; raises OSError, and then it is not open."""
        name = job.name
        controller = JobController(job, self._services, spans)
        if (relays := self.runtime.relays(name)).is_dir():
            controller.keep_store(relays)
        elif job.foreign_relays is not None:
            controller.keep_store(job.foreign_relays)
        self.controllers[name] = controller
        if not job.adoptions:
            launcher = job.launcher.pid if job.launcher is not None else 0
            self.history.add(job_started(name, launcher, [str(one.drill) for one in job.drills]))
        if job.launcher is not None:
            controller.run(self._follow_launcher(job, job.launcher))
        if job.span is not None and job.span.leader:
            controller.follow_leader()
        else:
            controller.lead()

    def adopt(self, job: Job, sessions: Sequence[Session], spans: JobSpans) -> None:
        """A job that a predecessor opened, with sessions whose devices the pool knows to be leased."""
        self.begin(job, spans)
        for session in sessions:
            job.sessions[session.rank] = session
            self.leases.hold(session)
            self._background.start(self.follow_worker(session))
            self.follow(session)
        self.controllers[job.name].validations.go_on(sessions)

    async def close_job(self, name: str, message: str = "its launcher has ended") -> pb.JobReport:
        """End what is left of a job and answer its report; raises Refused."""
        if name not in self._closings:
            if name not in self.jobs:
                raise Refused(f"there is no job {name}")
            self._closings[name] = asyncio.create_task(self._close(self.jobs[name], message))
            self._closings[name].add_done_callback(lambda _: self._closings.pop(name, None))
        return await asyncio.shield(self._closings[name])

    async def _close(self, job: Job, message: str) -> pb.JobReport:
        job.closing = True
        sessions = [session for session in job.sessions.values() if self._is_of_launcher(session)]
        if sessions:
            await asyncio.wait(
                [asyncio.ensure_future(s.worker.ended.wait()) for s in sessions], timeout=LEAVE_WITHIN
            )
        for session in sessions:
            if session.worker.running:
                session.fail(f"the session of rank {session.rank} was ended: {message}")
                self.end_soon(session)
        await asyncio.gather(*(session.closed.wait() for session in sessions))
        if not goes_on(job):
            return await self._finish(job, message)
        if job.name not in self._lingering:
            self._lingering.add(job.name)
            self._background.start(self._close_later(job))
        return job.report()

    def _is_of_launcher(self, session: Session) -> bool:
        """Whether its worker was started here, and runs here; one that has come from another host stays."""
        relay = Path(session.relay)
        return not session.host and (not session.relay or relay.is_relative_to(self.runtime.path))

    async def _close_later(self, job: Job) -> None:
        """Ranks that others have started need us: those that run elsewhere, and those that have come."""
        log.info("ranks of other launchers go on", job=job.name, ranks=sorted(job.sessions))
        async with job.changed:
            while goes_on(job):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await job.changed.wait()
        self._lingering.discard(job.name)
        await self._finish(job, "ranks of other launchers went on")

    async def _finish(self, job: Job, why: str) -> pb.JobReport:
        """Nothing runs any more."""
        controller = self.controllers[job.name]
        report = await controller.spans.close(job) if job.span is not None else None
        controller.stop_work()
        self.leases.lift_rehearsed(job.name)
        await controller.dismiss()
        if job.launcher is not None:
            job.launcher.close()
        self._store.forget(f"{job.name}/")
        controller.close_store()
        self.runtime.remove_job(job.name)
        self.remote_ranks.forget_foreign_relays(job)
        del self.controllers[job.name]
        self._tell_closed(job)
        self.note()
        async with job.changed:
            job.changed.notify_all()
        told = report if report is not None and not report.error else job.report()
        job.note_end(why, told)
        log.info("job closed", job=job.name, recoveries=len(job.recoveries))
        return told

    async def _follow_launcher(self, job: Job, launcher: Watched) -> None:
        await launcher.ended.wait()
        if job.name in self.jobs and not job.closing:
            await self.close_job(job.name, f"its launcher (pid {launcher.pid}) ended")

    # ------------------------------------------------------------------ sessions
    async def open_session(self, request: Any) -> Session:
        """Give a worker a log and a device; raises Refused."""
        job = self.jobs.get(request.job)
        if job is None or job.closing:
            raise Refused(f"there is no job {request.job!r}: start the script with proxyrun")
        check_version(self.installation.torch_version, request.torch_version)
        check_nccl(self.settings, request.nccl)
        if request.world < 1 or not 0 <= request.rank < request.world:
            raise Refused(f"rank {request.rank} of {request.world} is not possible")
        if not 0 <= request.device_index < self.settings.devices.count:
            raise Refused(more_ranks_than_devices(self.settings.devices, request.rank, request.device_index))
        if request.pid_namespace:
            request.worker_pid = await asyncio.to_thread(pid_here, request.worker_pid, request.pid_namespace)
        known = job.sessions.get(request.rank)
        if known is not None and known.adopted_from(request.worker_pid):
            return known  # the answer of the proxyd that died did not reach it
        await former_gone(self.leases.holder(request.device_index), job, request)
        if job.span is not None and job.span.leader:
            return await self.remote_ranks.open_for_leader(job, request)
        return await self.open_here(job, request)

    async def open_here(self, job: Job, request: Any) -> Session:
        async with job.opening:
            index = self.leases.place(request.device_index)
            with self.leases.claim(index):
                return await self._open(job, request, index)

    async def _open(self, job: Job, request: Any, index: int) -> Session:
        check_drills(job, request.world)
        holder = self.leases.holder(index)
        if holder is not None or request.rank in job.sessions:
            raise Refused(held(holder or job.sessions[request.rank], request))
        device = self.settings.devices.names[index]
        try:
            worker = Watched(request.worker_pid)
        except (ProcessLookupError, OSError):
            raise Refused(f"the worker (pid {request.worker_pid}) has ended already") from None
        directory = self.runtime.rank_directory(job.name, request.rank, job.openings)
        job.openings += 1
        try:
            made = make_log(directory, request, self.settings)
            server = await self._pool.take(device)
        except (SpawnerError, replay.LogError) as problem:
            worker.close()
            shutil.rmtree(directory, ignore_errors=True)
            raise Refused(str(problem)) from problem
        session = Session(
            job=job, rank=request.rank, world=request.world, device=device, device_index=index,
            asked_index=request.device_index, threads=request.threads, worker=worker, directory=directory,
            log=made, server=server, generation=job.generation, relay=request.relay,
        )  # fmt: skip
        self.leases.hold(session)
        job.sessions[request.rank] = session
        job.departed.pop(request.rank, None)
        job.last_facts.pop(request.rank, None)
        job.arm(session)
        self.controllers[job.name].validations.arm(session)
        self.note()
        problem_text = await attach(session, self.settings.keeps_optimizer_preimages)
        self._background.start(self.follow_worker(session))
        self.follow(session)
        self._pool.fill()
        if problem_text:
            session.fail(problem_text)
            self.end_soon(session)
            raise Refused(f"rank {session.rank} got no device: {problem_text}")
        log.info("session opened", job=job.name, rank=session.rank, device=device, worker=worker.pid,
                 server=server.pid)  # fmt: skip
        return session

    # ------------------------------------------------------------------ ends
    async def follow_worker(self, session: Session) -> None:
        """A worker that is being moved ends, and comes back as another process."""
        followed = None
        while followed is not session.worker:
            followed = session.worker
            await followed.ended.wait()
            if session.moving is not None:
                await session.moving.wait()
        await self._end(session)

    async def move_worker(self, session: Session, criu: str, images: str) -> str:
        """Answers what happened; raises Refused."""
        if session.destination is not None:
            raise Refused(f"rank {session.rank} is on its way to another device: move its worker afterwards")
        began, step = time.monotonic(), session.log.step
        detail = await move_worker(session, criu, images)
        took = time.monotonic() - began
        session.job.history.add(worker_moved(session.job.name, session.rank, step, took, detail))
        self.note()
        return detail

    def follow(self, session: Session) -> None:
        """Watch the session's present server, which may be about to be attached."""
        self.note()
        early = 0 if session.host else self._early_notice.follow(session.server.process, session.directory)
        self._background.start(self._notice_death(session, session.server, early))

    async def _notice_death(self, session: Session, server: Server, early: int) -> None:
        try:
            await first_of(server.process.ended, session.closed)  # a sound server outlives the session
        finally:
            self._early_notice.leave(early)
        controller = self.controllers.get(session.job.name)
        if session.moving is not None:
            await session.moving.wait()
        died = server.process.ended.is_set() and session.worker.running
        if controller is not None and controller.told is not None and session.server is server and died:
            controller.told.server_died(session)

    def end_soon(self, session: Session) -> None:
        """Its cleanup, without waiting."""
        self._background.start(self._end(session))

    async def _end(self, session: Session) -> None:
        """Nothing is left of the session when this returns."""
        if session.state == "ended":
            return await _wait(session.closed)
        job = session.job
        clean = session.log.session_state == SESSION_CLOSED
        state, session.state = "lost" if session.state == "lost" else "ended", "ended"
        if job.sessions.get(session.rank) is session:  # and has not been opened again meanwhile
            job.departed[session.rank] = clean
            job.last_facts[session.rank] = rank_facts(session, self.settings.keeps_optimizer_preimages)
        controller = self.controllers.get(job.name)
        if controller is not None:
            controller.validations.collect(session)
        job.remember(session, clean, state)
        if controller is not None and controller.told is not None:
            controller.told.worker_left(session)
        if session.host:
            if controller is not None:
                await controller.spans.ended(session)
        else:
            if session.source_server is not None:
                self._pool.retire(session.source_server)
            await self._pool.end(session.server)  # what is in it is of no other session's business
            shutil.rmtree(session.directory, ignore_errors=True)
            self.leases.release(session)
        session.worker.close()
        if job.sessions.get(session.rank) is session:
            del job.sessions[session.rank]
        session.closed.set()
        self.note()
        self.remote_ranks.close_if_unused(job)
        log.info("session ended", job=job.name, rank=session.rank, orderly=clean)
        async with job.changed:
            job.changed.notify_all()

    async def close(self, message: str) -> None:
        """proxyd stops: every session is lost."""
        for controller in list(self.controllers.values()):
            job = controller.job
            job.closing = True
            for session in job.sessions.values():
                if session.log.session_state != SESSION_CLOSED:
                    session.fail(message)
            await controller.dismiss()
            controller.stop_work()
            job.note_end(message, job.report())
        await self._background.cancel()
        await self.leases.health.close()
        self._early_notice.close()


def goes_on(job: Job) -> bool:
    """Whether ranks of it run, or other hosts have not told yet whether they have any."""
    return bool(job.sessions) or (job.span is not None and bool(job.span.awaited))


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
