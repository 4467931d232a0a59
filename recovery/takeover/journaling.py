"""Keeps the journal up to date: what a successor needs to adopt this proxyd's jobs."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import structlog

from understudy.protos import control_pb2 as pb
from understudy.recovery.agent.host_agent import HostAgent
from understudy.recovery.agent_api.server import Server
from understudy.recovery.host.servers import ServerPool
from understudy.recovery.machine.processes import start_ticks
from understudy.recovery.state.jobs import Job, Session
from understudy.recovery.state.journaled_job import journaled_durable, journaled_job
from understudy.recovery.takeover import journal

log = structlog.get_logger()

LOOK_S = 0.2
"""How often the journal is compared with the truth, and touched: a sign of life."""


class Journaling:
    """Writes the journal of one agent."""

    def __init__(self, agent: HostAgent, pool: ServerPool, runtime: Path) -> None:
        self._agent = agent
        self._pool = pool
        self._runtime = runtime
        self._written = pb.Journal()
        self._failed = False
        agent.note = self.note

    def note(self) -> None:
        """Write what has changed, before it has consequences."""
        now = journal_of(self._agent, self._pool)
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


def journal_of(agent: HostAgent, pool: ServerPool) -> pb.Journal:
    """Everything that a successor cannot find out by itself."""
    settings = agent.settings
    return pb.Journal(
        socket=str(settings.socket),
        devices=f"{settings.devices.kind}:{settings.devices.count}",
        optimizer_preimages=settings.keeps_optimizer_preimages,
        **settings.gpu_ways,
        proxyd=pb.Process(pid=os.getpid(), start_ticks=start_ticks(os.getpid())),
        fenced=agent.leases.fenced,
        worn=agent.leases.worn,
        gpus=pool.gpus,
        draining=sorted(agent.leases.draining),
        jobs=[_job(agent, job) for _, job in sorted(agent.jobs.items())],
        servers=sorted((_server(server) for server in pool.servers), key=lambda server: str(server.socket)),
    )


def _job(agent: HostAgent, job: Job) -> pb.JournaledJob:
    known = agent.coordinators.get(job.name)
    sessions = [
        _session(session, agent.runtime.path)
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
