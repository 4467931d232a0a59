"""Keeps the journal up to date: what a successor needs to adopt this proxyd's jobs."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import structlog

from understudy.protos import control_pb2 as pb
from understudy.recovery.agent.open_jobs import OpenJobs
from understudy.recovery.agent_api.server import Server
from understudy.recovery.config.settings import Settings
from understudy.recovery.host.leases import Leases
from understudy.recovery.host.servers import ServerPool
from understudy.recovery.machine.processes import start_ticks
from understudy.recovery.state.jobs import Job, Session
from understudy.recovery.state.journaled_job import journaled_durable, journaled_job
from understudy.recovery.takeover import journal

log = structlog.get_logger()

LOOK_S = 0.2
"""How often the journal is compared with the truth, and touched: a sign of life."""


class Journaling:
    """Writes the journal of one proxyd."""

    def __init__(
        self, settings: Settings, open_jobs: OpenJobs, leases: Leases, pool: ServerPool, runtime: Path
    ) -> None:
        self._settings, self._open, self._leases = settings, open_jobs, leases
        self._pool = pool
        self._runtime = runtime
        self._begun = False
        self._written = pb.Journal()
        self._failed = False

    def begin(self) -> None:
        """All that a predecessor left is adopted: its journal, which counts until then, may be replaced."""
        self._begun = True
        self.note()

    def note(self) -> None:
        """Write what has changed, before it has consequences; nothing before `begin`."""
        if not self._begun:
            return
        now = self._journal()
        if now == self._written:
            return
        try:
            journal.write(self._runtime, now)
        except OSError as problem:
            if not self._failed:
                log.error(
                    "the journal cannot be written: nobody can adopt jobs if proxyd dies",
                    problem=str(problem),
                )
            self._failed = True
            return
        self._failed = False
        self._written = now

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.note()
            journal.touch(self._runtime)
            await asyncio.sleep(LOOK_S)

    def _journal(self) -> pb.Journal:
        """Everything that a successor cannot find out by itself."""
        settings, leases = self._settings, self._leases
        servers = (_server(server) for server in self._pool.servers)
        return pb.Journal(
            socket=str(settings.socket),
            devices=f"{settings.devices.kind}:{settings.devices.count}",
            optimizer_preimages=settings.keeps_optimizer_preimages,
            **settings.gpu_ways,
            proxyd=pb.Process(pid=os.getpid(), start_ticks=start_ticks(os.getpid())),
            fenced=leases.fenced,
            worn=leases.worn,
            gpus=self._pool.gpus,
            draining=sorted(leases.draining),
            jobs=[self._job(job) for _, job in sorted(self._open.jobs.items())],
            servers=sorted(servers, key=lambda server: str(server.socket)),
        )

    def _job(self, job: Job) -> pb.JournaledJob:
        known = self._open.coordinators.get(job.name)
        sessions = [
            _session(session, self._runtime)
            for _, session in sorted(job.sessions.items())
            # Of one that has ended all is told in `ends`; of ranks on other hosts, their proxyds tell.
            if session.state != "ended" and not session.host
        ]
        return journaled_job(job, known.corruption if known is not None else None, sessions)


def _place(directory: Path, runtime: Path) -> str:
    """The name of a rank's directory; its whole path if the rank came from another host."""
    return directory.name if directory.parent.parent == runtime else str(directory)


def _session(session: Session, runtime: Path) -> pb.JournaledSession:
    return pb.JournaledSession(
        rank=session.rank,
        world=session.world,
        device_index=session.device_index,
        asked_index=session.asked_index,
        threads=session.threads,
        worker=session.worker.message(),
        directory=_place(session.directory, runtime),
        server=_server(session.server) if session.server.pid else None,
        stash=_server(session.source_server) if session.source_server is not None else None,
        lost=session.state == "lost",
        recoveries=session.recoveries,
        resumed_commit=session.resumed_commit,
        note=session.note,
        generation=session.generation,
        drills_seen=sorted(session.drills_seen),
        durable=[journaled_durable(durable) for durable in session.durable],
        mirrored_step=session.mirrored_step,
        relay=session.relay,
        destination=session.destination,
    )


def _server(server: Server) -> pb.JournaledServer:
    return pb.JournaledServer(
        process=server.process.message(),
        socket=server.socket.name,
        device=server.device,
        data_address=server.data_address,
    )
