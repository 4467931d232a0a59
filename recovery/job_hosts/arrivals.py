"""Ranks whose workers come from other hosts, with their logs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from understudy import replay
from understudy.protos import control_pb2 as pb
from understudy.recovery.agent.host_agent import HostAgent
from understudy.recovery.agent_api.commands import NotDone
from understudy.recovery.agent_api.server import AbsentServer
from understudy.recovery.base.errors import Refused
from understudy.recovery.machine.processes import Watched
from understudy.recovery.spanning.interface import JobSpans
from understudy.recovery.spanning.ranks.mark import read_mark
from understudy.recovery.state.jobs import Job, Session
from understudy.recovery.state.span import Span

log = structlog.get_logger()


class Arrivals:
    """Receives the ranks of one proxyd."""

    def __init__(self, agent: HostAgent, spans: JobSpans, here: str) -> None:
        self._agent, self._spans, self._here = agent, spans, here
        self._awaited: dict[tuple[str, int], asyncio.Future[tuple[Path, int, str]]] = {}

    def expect(self, job: str, rank: int) -> asyncio.Future[tuple[Path, int, str]]:
        """A rank of a job that we lead: directory of its log, pid and relay, once it is here."""
        future: asyncio.Future[tuple[Path, int, str]] = asyncio.get_running_loop().create_future()
        self._awaited[job, rank] = future
        return future

    def take_in(self, header: pb.WorkerHeader, pid: int, directory: Path) -> None:
        """A worker that runs here, as pid, with its log in that directory."""
        relay = f"{header.relay}/s"
        awaited = self._awaited.pop((header.job, header.rank), None)
        if awaited is not None and not awaited.done():
            awaited.set_result((directory, pid, relay))
            return
        job = self._agent.jobs.get(header.job)
        known = job.sessions.get(header.rank) if job is not None else None
        if known is not None and known.directory == directory and not known.host:
            return  # it was here when a proxyd died, and its session was adopted
        try:
            if job is not None and known is not None and known.host and self._belongs(job, header):
                return self._spans.came_here(known, directory, pid, relay)
            self._open(header, pid, directory, relay)
        except (Refused, NotDone, replay.LogError, OSError) as problem:
            log.error("a worker that arrived gets no session", job=header.job, rank=header.rank,
                      problem=str(problem))  # fmt: skip
            _fail_log(directory, f"host {self._here} could not take rank {header.rank} in: {problem}")

    def _open(self, header: pb.WorkerHeader, pid: int, directory: Path, relay: str) -> None:
        mark = read_mark(header.more)
        job = self._agent.jobs.get(header.job)
        if job is None and mark.leader == self._here:
            raise Refused(f"this host leads no job {header.job}")
        if job is not None and not self._belongs(job, header):
            raise Refused(f"there is another job {header.job} here")
        if job is not None and header.rank in job.sessions:
            raise Refused(f"rank {header.rank} runs here already")
        device_index, device = self.take_device(mark.device)
        page = replay.Log(str(directory))
        if job is None:  # nothing can go wrong any more with its first rank here
            span = Span(mark.hosts, mark.token, mark.leader)
            job = Job(
                header.job, None, [], span=span, generation=header.generation,
                foreign_relays=Path(header.relay).parent, history=self._agent.history,
            )  # fmt: skip
            self._agent.begin(job, self._spans)
        session = Session(
            job=job, rank=header.rank, world=header.world, device=device, device_index=device_index,
            asked_index=device_index, threads=header.threads, worker=Watched(pid),
            directory=directory, log=page, server=AbsentServer(device), lacks_state=True,
            relay=relay, recoveries=mark.recoveries, generation=header.generation,
            resumed_commit=mark.resumed_commit,
        )  # fmt: skip
        self._agent.leases.hold(session)
        job.sessions[header.rank] = session
        self._agent.remote_ranks.receive(session)
        if (deputy := self._agent.deputies.get(job.name)) is not None:
            deputy.arrived(session)
        else:  # we lead, and have not heard of it since we were started anew
            session.server.retired = False
            self._agent.follow(session)

    @staticmethod
    def _belongs(job: Job, header: pb.WorkerHeader) -> bool:
        """Whether a worker is one of this very job."""
        return job.span is not None and job.span.admits(read_mark(header.more).token)

    def free_devices(self) -> int:
        """So many could come."""
        return len(self._agent.leases.free())

    def take_device(self, wished: str = "") -> tuple[int, str]:
        """One of ours; raises Refused."""
        names = self._agent.settings.devices.names
        free = self._agent.leases.for_arrivals()
        if not free:
            raise Refused(f"host {self._here} has no free device")
        index = next((index for index in free if names[index] == wished), free[0])
        return index, names[index]


def _fail_log(directory: Path, message: str) -> None:
    try:
        replay.Log(str(directory)).lose(message[:1000])
    except replay.LogError as problem:
        log.error("a worker cannot be told", directory=str(directory), problem=str(problem))
