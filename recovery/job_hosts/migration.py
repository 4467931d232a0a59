"""Ranks whose workers go to other hosts, with their logs."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

import structlog

from understudy.protos import control_pb2 as pb
from understudy.recovery.agent.host_agent import HostAgent
from understudy.recovery.base.errors import Refused
from understudy.recovery.host.placement import HostPlacement
from understudy.recovery.host.servers import ServerPool
from understudy.recovery.migration.process.imaging import Image, image_of
from understudy.recovery.migration.transfer.dumping import DumpedWorker
from understudy.recovery.migration.transfer.moves import Moves
from understudy.recovery.migration.transfer.reception import NotSent
from understudy.recovery.migration.transfer.shipping import Shipped, send_worker
from understudy.recovery.state.jobs import Job, Session

log = structlog.get_logger()

ENDS_S = 10.0


class Migration:
    """Sends the ranks of one proxyd, and takes images of their workers."""

    def __init__(self, agent: HostAgent, pool: ServerPool, moves: Moves, here: str) -> None:
        self._agent = agent
        self._placement = HostPlacement(pool, agent.leases)
        self._moves = moves
        self._here = here

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
            recoveries=session.recoveries, device=device, resumed_commit=session.resumed_commit,
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
        former, leaders = session.server, deputy.leaders
        try:
            transfer = await self.send(session, destination, keep_source, device)
            # A leader that has come meanwhile does not know of it, and may have had others made.
            known = session.server is former and deputy.leaders == leaders
            behind = former if keep_source and known else None
            for server in (session.server, session.source_server):
                if server is not None and server is not behind:
                    self._placement.retire(server)
            deputy.moved_out(session, behind)
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


def _transfer(source: str, shipped: Shipped) -> pb.Transfer:
    return pb.Transfer(
        source=source, destination=shipped.host, bytes=shipped.bytes, dump_s=shipped.dump_s,
        ship_s=shipped.ship_s, restore_s=shipped.restore_s, switch_s=shipped.switch_s,
        total_s=shipped.total_s,
    )  # fmt: skip
