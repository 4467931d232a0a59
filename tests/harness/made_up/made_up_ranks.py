"""Sessions over the simulation's logs, for what looks at a job from proxyd's side alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from simulation.log import RING, Commit, Log, Row
from simulation.programs import Program
from told_servers import Told

from understudy.protos import control_pb2 as pb
from understudy.recovery.host.leases import Leases
from understudy.recovery.host.placement import HostPlacement
from understudy.recovery.job.coordinator import Coordinator
from understudy.recovery.state.jobs import Job, Session

WEIGHT = 10
"""Handle of a buffer that all ranks have alike, as a rule."""


class Stub:
    """A device server that does as it is told, or says `problem`."""

    def __init__(self) -> None:
        self.problem = ""
        self.resumed: list[int] = []
        """Generations in which it was."""
        self.announced: list[list[int]] = []
        """Handles that were said to be replicated, each time."""

    async def SetReplicated(self, request: Any, timeout: float) -> Any:
        self.announced.append(list(request.handles))
        return pb.ReplicatedReply()

    async def Resume(self, request: Any, timeout: float) -> Any:
        self.resumed.append(request.generation)
        return pb.ResumeReply(error=self.problem)


class Server(Told):
    """That runs."""

    def __init__(self, pid: int) -> None:
        self.process, self.pid = SimpleNamespace(running=True), pid
        self.stub: Any = Stub()
        self.suspect = self.retired = False


def a_job(world: int) -> Job:
    job = Job("made-up", None, [])
    for rank in range(world):
        server = Server(rank)
        job.sessions[rank] = Session(
            job=job, rank=rank, world=world, device=f"cpu:{rank}", device_index=rank, threads=1,
            worker=cast(Any, None), directory=Path(f"/log-{rank}"),
            log=cast(Any, Log(rank, Program(), lambda _: None)), server=cast(Any, server),
        )  # fmt: skip
    return job


def log_of(job: Job, rank: int) -> Log:
    return cast(Log, job.sessions[rank].log)


def stub_of(job: Job, rank: int) -> Stub:
    return cast(Stub, cast(Any, job.sessions[rank].server).stub)


def end_server_of(job: Job, rank: int) -> None:
    """Nobody has noticed it yet."""
    cast(Any, job.sessions[rank].server.process).running = False


def a_coordinator(job: Job) -> Coordinator:
    pool = cast(Any, SimpleNamespace(fill=lambda: None))
    leases = Leases([session.device for session in job.sessions.values()], pool)
    return Coordinator(job, HostPlacement(pool, leases), True, lambda _: None)


def step(job: Job, *contents: int, manifest: bool = True) -> None:
    """Every rank commits; its weight has that content."""
    for session, content in zip(job.sessions.values(), contents, strict=True):
        log = log_of(job, session.rank)
        number = log.commit_count + 1
        rows = [Row(WEIGHT, 8, content, True)]
        made = Commit(number, number, manifest, manifest, [(1, 0, number)], [len(contents)], number, rows)
        log.ring[number % RING] = made
        log.commit_count = number
        log.step = number + 1
