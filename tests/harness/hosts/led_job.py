"""A job's leader `a` and its members in one process: real links, logs, deputies; made-up device servers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
from told_servers import Told

from understudy import replay
from understudy.recovery.agent_api.commands import NoPlace
from understudy.recovery.agent_api.server import AbsentServer, Pace
from understudy.recovery.base.control import pb, rpc
from understudy.recovery.config.settings import DeviceSpec, Settings
from understudy.recovery.job_hosts.job_link import JobLinkService
from understudy.recovery.machine.processes import Watched
from understudy.recovery.spanning.leader.lead import Lead
from understudy.recovery.spanning.member.deputy import Deputy
from understudy.recovery.spanning.member.member import MemberSide
from understudy.recovery.spanning.placement import SpanningPlacement
from understudy.recovery.spanning.ranks.remote import RemoteProcess
from understudy.recovery.state.jobs import Job, Session
from understudy.recovery.state.span import Span

TOKEN = b"t" * 32
SOON_S = 10.0


async def becomes(true: Callable[[], bool]) -> None:
    """Raises TimeoutError."""
    async with asyncio.timeout(SOON_S):
        while not true():
            await asyncio.sleep(0.005)


class Stub:
    """A device server that does as it is told, and remembers it."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.on: Callable[[str], Any] | None = None
        """Awaited before it answers."""

    def __getattr__(self, method: str) -> Any:
        async def call(request: Any, timeout: float) -> Any:
            self.told.append(method)
            if self.on is not None:
                await self.on(method)
            name = {"SetReplicated": "ReplicatedReply", "RebuildCommunicators": "RebuildReply"}.get(method)
            return getattr(pb, name or f"{method}Reply")()

        return call


class Server(Told):
    """Of a rank, on its host."""

    pids = 5_000_000

    def __init__(self) -> None:
        Server.pids += 1
        self.process = RemoteProcess(pb.Process(pid=Server.pids, start_ticks=7), lambda *_: None)
        self.stub = Stub()
        self.socket, self.device, self.data_address = Path("/none"), "cpu:0", ""
        self.retired = self.suspect = False
        self.verdict, self.generation = None, 0


class Placement:
    """Of a member."""

    def __init__(self) -> None:
        self.made: list[Server] = []
        self.retired: list[Any] = []
        self.gate = asyncio.Event()
        """Set: new servers come at once."""
        self.gate.set()
        self.problem, self.homeless = "", False

    def is_homeless(self, session: Session) -> bool:
        return self.homeless

    async def replacement(self, session: Session, keep_source: bool) -> Any:
        if keep_source:
            session.source_server = session.server
        else:
            self.retire(session.server)
        if self.problem:
            raise NoPlace(self.problem)
        server = Server()
        self.made.append(server)
        await self.gate.wait()
        return server

    def retire(self, server: Any) -> None:
        server.retired = True
        self.retired.append(server)
        server.process.hear_of_end()


class Member:
    """One of the job's other hosts."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self._folder = name, folder / name
        self._folder.mkdir()
        self.placement = Placement()
        devices = DeviceSpec("cpu", 1)
        settings = Settings(
            devices, Path("unused"), reply_bytes=1 << 16, shadow_bytes=1 << 16, snapshot_overhead=0
        )
        self.jobs: dict[str, Job] = {}
        self.deputies: dict[str, Any] = {}
        self.workers: Any = SimpleNamespace()
        """What carries workers away: as a test says."""
        self.side = MemberSide(
            self.jobs, self.deputies, settings, cast(Any, self.placement), follow=lambda session: None,
            close_if_unused=lambda job: None, note=lambda: None, workers=self.workers,
        )  # fmt: skip

    @property
    def socket(self) -> str:
        return f"unix:{self._folder}/s"

    async def __aenter__(self) -> Member:
        self._server = grpc.aio.server()
        rpc.add_JobLinkServicer_to_server(JobLinkService(cast(Any, None), self.side), self._server)
        self._server.add_insecure_port(self.socket)
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)

    def takes_part(self) -> Deputy:
        if "j" not in self.jobs:
            job = self.jobs["j"] = Job("j", None, [], span=Span(2, TOKEN, "a"))
            deputy = Deputy(
                job,
                cast(Any, None),
                lambda server: Pace(),
                self.side.describe,
                cast(Any, None),
                cast(Any, None),
            )
            self.deputies["j"] = deputy
        return cast(Deputy, self.deputies["j"])

    def open(self, rank: int, world: int = 2) -> Session:
        """Without telling anybody."""
        self.takes_part()
        job: Job = self.jobs["j"]
        directory = self._folder / f"rank-{rank}.{job.openings}"
        job.openings += 1
        directory.mkdir()
        replay.create_log(
            str(directory), rank=rank, world=world, segment_bytes=4 << 20, segment_count=4,
            reply_bytes=1 << 16, shadow_bytes=1 << 16,
        )  # fmt: skip
        session = Session(
            job=job, rank=rank, world=world, device="cpu:0", device_index=0, asked_index=0, threads=1,
            worker=Watched(os.getpid()), directory=directory, log=replay.Log(str(directory)),
            server=cast(Any, Server()),
        )  # fmt: skip
        job.sessions[rank] = session
        return session

    def end(self, session: Session) -> None:
        """Its worker has ended; as the agent does."""
        session.state = "ended"
        self.takes_part().worker_left(session)
        del session.job.sessions[session.rank]


class Leading:
    """A leadership that lasts."""

    def __init__(self, number: int) -> None:
        self.token = number
        self.holds = asyncio.Event()
        self.holds.set()

    async def run(self, superseded: Any) -> None:
        await asyncio.Event().wait()

    async def resign(self) -> None:
        """Nobody minds."""


class LeadersAgent:
    """What the leader has its agent do."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.told: list[pb.FaultReport] = []
        self.noted = 0
        self.problem = ""
        self.awaited: dict[int, asyncio.Future[Any]] = {}
        """By rank: who is to come to the leader's host."""
        self.followed: list[Session] = []

    def take_remote(self, session: Session) -> None:
        self.job.sessions[session.rank] = session

    def tell(self, report: pb.FaultReport) -> None:
        self.told.append(report)

    def follow(self, session: Session) -> None:
        """Its server is another one."""
        self.followed.append(session)

    def expect(self, session: Session) -> asyncio.Future[Any]:
        """It comes here."""
        self.awaited[session.rank] = asyncio.get_running_loop().create_future()
        return self.awaited[session.rank]

    def leaves_remote(self, session: Session, directory: Path, pid: int, relay: str) -> None:
        """It has come."""
        session.host, session.worker = "", Watched(pid)
        session.server, session.lacks_state = AbsentServer("cpu:1"), True

    def note(self) -> None:
        """Nobody reads it."""
        self.noted += 1


class Leader:
    """Host a.  `known`: members of a leader before it; `awaited`: those of them that had ranks."""

    numbers = 0

    def __init__(self, folder: Path, members: dict[str, Member], known: str = "", awaited: str = "") -> None:
        Leader.numbers += 1
        self._folder, self._number = folder, Leader.numbers
        self.job = Job("j", None, [])
        self.job.span = self.span = Span(2, TOKEN, leading=cast(Any, Leading(self._number)))
        self.span.members.update(known)
        self.span.awaited.update(awaited)
        self.agent = LeadersAgent(self.job)
        self._channels = {
            name: grpc.aio.insecure_channel(
                member.socket,
                options=[("grpc.max_reconnect_backoff_ms", 100), ("grpc.use_local_subchannel_pool", 1)],
            )
            for name, member in members.items()
        }
        links: Any = SimpleNamespace(to=self._channels.__getitem__)
        runtime: Any = SimpleNamespace(rank_directory=self._directory)
        self.lead = Lead(self.job, self.span, links, runtime, cast(Any, self.agent), "a")

    def _directory(self, job: str, rank: int, opening: int) -> Path:
        made = self._folder / f"leader-{self._number}-rank-{rank}.{opening}"
        made.mkdir()
        return made

    async def __aenter__(self) -> Leader:
        self.lead.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.lead.close()
        for channel in self._channels.values():
            await channel.close()

    async def hears_of(self, rank: int) -> Session:
        await becomes(lambda: rank in self.job.sessions)
        return self.job.sessions[rank]


def placement_of(leader: Leader) -> SpanningPlacement:
    """Where servers of the job's ranks come from; no host is cut off."""

    async def none_cut_off(hosts: list[str]) -> frozenset[str]:
        return frozenset()

    return SpanningPlacement(cast(Any, None), cast(Any, None), leader.lead, lambda host: {}, none_cut_off)
