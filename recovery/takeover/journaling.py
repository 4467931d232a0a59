"""Keeps the journal up to date: what a successor needs to adopt this proxyd's jobs."""

from __future__ import annotations

import asyncio
import os
from dataclasses import astuple
from pathlib import Path

import structlog

from understudy.recovery.base.control import pb
from understudy.recovery.desk.sessions import Desk
from understudy.recovery.host.servers import ServerPool
from understudy.recovery.machine.processes import start_ticks
from understudy.recovery.planning.facts import CommitFacts
from understudy.recovery.state.counts import Ended
from understudy.recovery.state.durable import Durable
from understudy.recovery.state.jobs import Job, Session
from understudy.recovery.state.server import Server
from understudy.recovery.state.span import Span
from understudy.recovery.takeover import journal

log = structlog.get_logger()

LOOK_S = 0.2
"""How often the journal is compared with the truth, and touched: a sign of life."""


class Journaling:
    """Writes the journal of one desk."""

    def __init__(self, desk: Desk, pool: ServerPool, runtime: Path) -> None:
        self._desk = desk
        self._pool = pool
        self._runtime = runtime
        self._written = pb.Journal()
        self._failed = False
        desk.note = self.note

    def note(self) -> None:
        """Write what has changed, before it has consequences."""
        now = journal_of(self._desk, self._pool)
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


def journal_of(desk: Desk, pool: ServerPool) -> pb.Journal:
    """Everything that a successor cannot find out by itself."""
    settings = desk.settings
    return pb.Journal(
        socket=str(settings.socket),
        devices=f"{settings.devices.kind}:{settings.devices.count}",
        optimizer_preimages=settings.keeps_optimizer_preimages,
        proxyd=pb.Process(pid=os.getpid(), start_ticks=start_ticks(os.getpid())),
        fenced=desk.leases.fenced,
        draining=sorted(desk.leases.draining),
        jobs=[journaled_job(desk, job) for _, job in sorted(desk.jobs.items())],
        servers=sorted((_server(server) for server in pool.servers), key=lambda server: str(server.socket)),
    )


def journaled_job(desk: Desk, job: Job, *, sessions: bool = True) -> pb.JournaledJob:
    """`sessions`: with those of this host."""
    found = desk.coordinators[job.name].corruption if job.name in desk.coordinators else None
    return pb.JournaledJob(
        name=job.name,
        launcher=job.launcher.message() if job.launcher is not None else None,
        generation=job.generation,
        openings=job.openings,
        drills=[pb.JournaledDrill(drill=s.drill.message(), slot=s.slot, fired=s.fired) for s in job.drills],
        # Of one that has ended everything is told in `ends`.
        sessions=[
            _session(session, desk.runtime.path)
            for _, session in sorted(job.sessions.items())
            # Of ranks on other hosts, their proxyds tell.
            if sessions and session.state != "ended" and not session.host
        ],
        departures=[_departure(job, rank) for rank in sorted(job.departed)],
        ends=[_end(ended) for ended in job.ended],
        recoveries=job.recoveries,
        adoptions=job.adoptions,
        validations=job.validations,
        not_replayable=job.not_replayable,
        corruption=found or job.corruption,
        decision=job.decision,
        span=_span(job, job.span) if job.span is not None else None,
    )


def _span(job: Job, span: Span) -> pb.JournaledSpan:
    guest, hosts = job.guest, {session.host for session in job.sessions.values() if session.host}
    return pb.JournaledSpan(
        hosts=span.hosts,
        leader=span.leader,
        token=span.token,
        members=sorted(span.members),
        awaited=sorted(hosts | span.awaited | span.destinations),
        guest=str(guest) if guest is not None else "",
        stored_run=str(span.stored.run) if span.stored is not None else "",
        stored_step=span.stored.step if span.stored is not None else 0,
        given_up=[
            pb.JournaledWorker(host=one.host, process=pb.Process(pid=one.pid, start_ticks=one.start_ticks))
            for one in sorted(span.given_up, key=astuple)
        ],
    )


def _place(directory: Path, runtime: Path) -> str:
    """Of a rank from another host its whole path."""
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
        stash=_server(session.stash) if session.stash is not None else None,
        lost=session.state == "lost",
        recoveries=session.recoveries,
        resumed_commit=session.resumed_commit,
        note=session.note,
        generation=session.generation,
        drills_seen=sorted(session.drills_seen),
        durable=[_durable(durable) for durable in session.durable],
        mirrored_step=session.mirrored_step,
        relay=session.relay,
        destination=session.destination,
    )


def _durable(durable: Durable) -> pb.JournaledDurable:
    return pb.JournaledDurable(
        serial=durable.serial, run=str(durable.run), bytes=durable.bytes, log_offset=durable.log_offset,
        commit=_commit(durable.commit),
    )  # fmt: skip


def _commit(commit: CommitFacts) -> pb.JournaledCommit:
    return pb.JournaledCommit(
        number=commit.number, step=commit.step, call=commit.call, members=commit.members,
        index=commit.index,
        communicators=[word for mark in commit.communicators for word in mark],
    )  # fmt: skip


def _server(server: Server) -> pb.JournaledServer:
    return pb.JournaledServer(
        process=server.process.message(),
        socket=server.socket.name,
        device=server.device,
        data_address=server.data_address,
    )


def _departure(job: Job, rank: int) -> pb.JournaledDeparture:
    departure = pb.JournaledDeparture(rank=rank, clean=job.departed[rank])
    if rank in job.last_facts:
        facts = job.last_facts[rank]
        departure.generation = facts.generation
        departure.newest.CopyFrom(_commit(facts.newest))
    return departure


def _end(ended: Ended) -> pb.JournaledEnd:
    return pb.JournaledEnd(
        clean=ended.clean,
        steps=ended.steps,
        calls_per_step=ended.calls_per_step,
        bytes_per_step=ended.bytes_per_step,
        replies_compared=ended.replies_compared,
        replies_different=ended.replies_different,
        recent_calls=ended.recent_calls,
        status=ended.status,
        automatic_commits=ended.automatic_commits,
        records=ended.records,
    )
