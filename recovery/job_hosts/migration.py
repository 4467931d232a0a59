"""Ranks whose workers go to other hosts, or come from there, with their logs."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import structlog

from understudy import replay
from understudy.protos import control_pb2 as pb
from understudy.recovery.agent.host_agent import HostAgent
from understudy.recovery.agent_api.server import AbsentServer
from understudy.recovery.base.errors import Refused
from understudy.recovery.host.placement import HostPlacement
from understudy.recovery.host.servers import ServerPool
from understudy.recovery.machine.processes import Watched
from understudy.recovery.migration.process.imaging import Image, image_of
from understudy.recovery.migration.transfer.dumping import DumpedWorker
from understudy.recovery.migration.transfer.moves import Callbacks, Moves
from understudy.recovery.migration.transfer.reception import NotSent
from understudy.recovery.migration.transfer.shipping import Shipped, send_worker
from understudy.recovery.spanning.interface import JobSpans
from understudy.recovery.spanning.member.member import MemberSide
from understudy.recovery.spanning.ranks.mark import read_mark
from understudy.recovery.state.jobs import Job, Session
from understudy.recovery.state.span import Span

log = structlog.get_logger()

ENDS_S = 10.0


class Migration:
    """Sends and receives the ranks of one proxyd."""

    def __init__(
        self,
        agent: HostAgent,
        pool: ServerPool,
        moves: Moves,
        member: MemberSide,
        spans: JobSpans,
        here: str,
    ) -> None:
        self._agent = agent
        self._pool = pool
        self._placement = HostPlacement(pool, agent.leases)
        self._moves = moves
        self._member = member
        self._spans = spans
        self._here = here
        moves.callbacks = Callbacks(
            arrived=self._arrived, free_devices=lambda: len(self._agent.leases.free())
        )
        self._awaited: dict[tuple[str, int], asyncio.Future[tuple[Path, int, str]]] = {}

    # ------------------------------------------------------------------ going
    async def send(
        self, session: Session, destination: str, keep_source: bool, device: str = ""
    ) -> pb.Transfer:
        """Its worker and log; its server is ended, or stays to be copied from.  Raises Refused."""
        if not session.relay:
            raise Refused(
                f"the worker of rank {session.rank} cannot be moved: start the run with proxyrun --migratable"
            )
        if not keep_source:
            session.server.retired = True
            self._placement.retire(session.server)
            try:
                await asyncio.wait_for(session.server.process.memory_gone.wait(), ENDS_S)
            except TimeoutError:
                raise Refused(f"the device server of rank {session.rank} does not end") from None
        span = session.job.span
        assert span is not None
        mark = pb.SpanMark(
            token=span.token, leader=span.leader or self._here, hosts=span.hosts,
            recoveries=session.recoveries, device=device,
        )  # fmt: skip
        worker = DumpedWorker.of(session, mark.SerializeToString())
        try:
            return _transfer(self._here, await send_worker(self._moves, worker, destination))
        except NotSent as problem:
            raise Refused(str(problem)) from problem

    async def send_for_leader(
        self, job: Job, session: Session, destination: str, keep_source: bool, device: str
    ) -> pb.Transfer:
        """A rank of ours, as the leader wants it; raises Refused."""
        deputy = self._agent.deputies[job.name]
        if session.moving is not None:
            raise Refused(f"the worker of rank {session.rank} is being moved already")
        session.moving = asyncio.Event()
        try:
            transfer = await self.send(session, destination, keep_source, device)
            deputy.moved_out(session, session.server if keep_source else None)
            self._agent.remote_ranks.moved_out(session)
            return transfer
        finally:
            session.moving.set()
            session.moving = None

    def image(self, session: Session) -> AbstractAsyncContextManager[Image]:
        """An image of the worker of a rank of ours, which runs on; raises NotSent."""
        moving = session.moving = asyncio.Event()

        def running_again() -> None:
            session.moving = None
            moving.set()

        return image_of(self._moves, DumpedWorker.of(session), running_again)

    # ------------------------------------------------------------------ coming
    def expect(self, job: str, rank: int) -> asyncio.Future[tuple[Path, int, str]]:
        """A rank of a job that we lead: directory of its log, pid and relay, once it is here."""
        future: asyncio.Future[tuple[Path, int, str]] = asyncio.get_running_loop().create_future()
        self._awaited[job, rank] = future
        return future

    def _arrived(self, header: pb.WorkerHeader, pid: int, directory: Path) -> None:
        relay = f"{header.relay}/s"
        awaited = self._awaited.pop((header.job, header.rank), None)
        if awaited is not None and not awaited.done():
            awaited.set_result((directory, pid, relay))
            return
        job = self._agent.jobs.get(header.job)
        known = job.sessions.get(header.rank) if job is not None else None
        if known is not None and known.directory == directory:
            return  # it was here when a proxyd died, and its session was adopted
        try:
            self._open(header, pid, directory, relay)
        except (Refused, replay.LogError, OSError) as problem:
            log.error("a worker that arrived gets no session", job=header.job, rank=header.rank,
                      problem=str(problem))  # fmt: skip
            _fail_log(directory, f"host {self._here} could not take rank {header.rank} in: {problem}")

    def _open(self, header: pb.WorkerHeader, pid: int, directory: Path, relay: str) -> None:
        mark = read_mark(header.more)
        job = self._agent.jobs.get(header.job)
        if job is None and mark.leader == self._here:
            raise Refused(f"this host leads no job {header.job}")
        if job is None:
            span = Span(mark.hosts, mark.token, mark.leader)
            job = Job(
                header.job, None, [], span=span, generation=header.generation,
                foreign_relays=Path(header.relay).parent, history=self._agent.history,
            )  # fmt: skip
            self._agent.begin(job, self._spans)
        deputy = self._agent.deputies.get(job.name)
        if job.span is None or not job.span.admits(mark.token) or deputy is None:
            raise Refused(f"there is another job {header.job} here")
        if header.rank in job.sessions:
            raise Refused(f"rank {header.rank} runs here already")
        device_index, device = self.take_device(mark.device)
        session = Session(
            job=job, rank=header.rank, world=header.world, device=device, device_index=device_index,
            asked_index=device_index, threads=header.threads, worker=Watched(pid),
            directory=directory, log=replay.Log(str(directory)), server=AbsentServer(device),
            lacks_state=True,
            relay=relay, recoveries=mark.recoveries, generation=header.generation,
        )  # fmt: skip
        self._agent.leases.hold(session)
        job.sessions[header.rank] = session
        self._agent.remote_ranks.receive(session)
        deputy.arrived(session, self._member.describe(session))

    def take_device(self, wished: str = "") -> tuple[int, str]:
        """One of ours; raises Refused."""
        names = self._agent.settings.devices.names
        free = self._agent.leases.free()
        if not free:
            raise Refused(f"host {self._here} has no free device")
        index = next((index for index in free if names[index] == wished), free[0])
        return index, names[index]


def _transfer(source: str, shipped: Shipped) -> pb.Transfer:
    return pb.Transfer(
        source=source, destination=shipped.host, bytes=shipped.bytes, dump_s=shipped.dump_s,
        ship_s=shipped.ship_s, restore_s=shipped.restore_s, switch_s=shipped.switch_s,
        total_s=shipped.total_s,
    )  # fmt: skip


def _fail_log(directory: Path, message: str) -> None:
    try:
        replay.Log(str(directory)).lose(message[:1000])
    except replay.LogError as problem:
        log.error("a worker cannot be told", directory=str(directory), problem=str(problem))
