"""Ranks of a job that go from one host to another: the leader's side of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from understudy import replay
from understudy.protos import control_pb2 as pb
from understudy.recovery.agent_api.commands import NotDone
from understudy.recovery.machine.processes import Watched
from understudy.recovery.spanning.leader.own_host import OwnHost
from understudy.recovery.spanning.ranks.remote import NotMoved
from understudy.recovery.state.jobs import Session

if TYPE_CHECKING:
    from understudy.recovery.spanning.leader.lead import Lead
    from understudy.recovery.spanning.leader.member_link import MemberLink

log = structlog.get_logger()

MOVE_S, ARRIVES_S = 1500.0, 30.0


class Relocations:
    """Moves each rank to the host where it is to go, and knows which are under way."""

    def __init__(self, lead: Lead, own_host: OwnHost) -> None:
        self._lead = lead
        self._own_host = own_host
        self._arriving: dict[int, tuple[Session, str, asyncio.Future[pb.RankDescription]]] = {}
        self._under_way: dict[Session, asyncio.Event] = {}
        self._for_moves: set[str] = set()
        """Hosts that take part only because a rank was to go there."""

    def may_arrive(self, rank: int) -> bool:
        """Whether it is on its way, or may be."""
        return rank in self._lead.span.astray

    def awaited_at(self, rank: int) -> str:
        """The host where it is about to arrive; empty: none."""
        _, host, described = self._arriving.get(rank, (None, "", None))
        return host if described is not None and not described.done() else ""

    def arrived(self, one: pb.RankDescription) -> Session:
        """The rank that was awaited there."""
        session, _, described = self._arriving[one.rank]
        described.set_result(one)
        return session

    def takes_part(self, host: str) -> None:
        """A host is to open ranks, whether or not one goes there."""
        self._for_moves.discard(host)

    async def move(self, session: Session, destination: str, keep_source: bool) -> pb.Transfer:
        """Its worker to another host, where it then has a device and no server; raises NotDone."""
        if session.moving is not None:
            raise NotDone(f"the worker of rank {session.rank} is being moved already")
        session.moving = self._under_way[session] = asyncio.Event()
        moved: asyncio.Future[pb.Transfer] = asyncio.get_running_loop().create_future()
        self._lead.run_beside(self._to_its_end(moved, session, destination, keep_source))
        return await asyncio.shield(moved)

    def under_way(self, session: Session) -> asyncio.Event | None:
        """Set once its worker is where it goes, or surely is not; None: it does not go anywhere."""
        return self._under_way.get(session)

    async def _to_its_end(
        self, moved: asyncio.Future[pb.Transfer], session: Session, destination: str, keep_source: bool
    ) -> None:
        """Even if the round that has begun it is broken off: nobody else would take in who arrives."""
        try:
            moved.set_result(await self._move(session, destination, keep_source))
        except replay.LogError as problem:
            moved.set_exception(NotDone(f"rank {session.rank} arrived without a log: {problem}"))
        except NotDone as problem:
            moved.set_exception(problem)
        finally:
            if not moved.cancel():
                moved.exception()  # perhaps nobody else looks at it
            self._under_way.pop(session).set()
            session.moving = None

    async def _move(self, session: Session, destination: str, keep_source: bool) -> pb.Transfer:
        coming = destination == self._lead.here
        expected = None if coming else asyncio.get_running_loop().create_future()
        arrives = self._own_host.expect(session) if coming else None
        self._lead.span.astray.add(session.rank)
        if expected is not None:
            if destination not in self._lead.span.members:
                self._for_moves.add(destination)
            self._lead.add(destination)
            self._expect(session, destination, expected)
        self._own_host.note()  # whoever leads after us must look there
        try:
            transfer = await self._send(session, destination, keep_source)
            former = session.worker
            if arrives is not None:
                directory, pid, relay = await asyncio.wait_for(arrives, ARRIVES_S)
                self._own_host.leaves_remote(session, directory, pid, relay)
                self._lead.drop_mirror(session)
            elif expected is not None:
                self._lead.members[destination].hurry.set()
                described = await asyncio.wait_for(expected, ARRIVES_S)
                self._lead.settle_at(session, self._lead.members[destination], described)
        except NotMoved:
            self.expect_no_more(session, destination)
            self._let_go(destination)
            raise
        except TimeoutError:
            raise NotDone(f"host {destination} does not tell that rank {session.rank} arrived") from None
        except NotDone:  # its host has not told how it went; but it may have come
            server = session.server
            if arrives is not None and arrives.done():
                self.has_come_here(session, *arrives.result())
            elif expected is not None and expected.done():
                self.has_come_there(session, self._lead.members[destination], expected.result())
            if session.server is not server and keep_source:
                session.source_server = server
            raise
        finally:  # if nobody knows, the rank may be there, or come later
            if arrives is not None:
                arrives.cancel()
            self._arriving.pop(session.rank, None)
            self._for_moves.discard(destination)
        self.expect_no_more(session, destination)
        if self._lead.images is not None and session.restores_from_image:
            self._lead.images.came_back(session)
        session.transfer = transfer
        former.hear_of_end()  # whoever follows it goes on with the other one
        log.warning("a rank has moved", job=self._lead.job.name, rank=session.rank, source=transfer.source,
                    destination=destination, total_s=round(transfer.total_s, 3))  # fmt: skip
        return transfer

    def has_come_here(self, session: Session, directory: Path, pid: int, relay: str) -> None:
        """From another host, though nobody awaits it any more; raises NotDone and LogError."""
        former = session.worker
        self._own_host.leaves_remote(session, directory, pid, relay)
        self._lead.drop_mirror(session)
        self._is_found(session, former)

    def has_come_there(self, session: Session, member: MemberLink, one: pb.RankDescription) -> None:
        """Likewise, as by the order of a leader that died; raises LogError."""
        former = session.worker
        self._lead.settle_at(session, member, one)
        self._is_found(session, former)

    def _is_found(self, session: Session, former: Watched) -> None:
        host = session.host or self._lead.here
        log.warning("a rank is found on another host", job=self._lead.job.name, rank=session.rank, host=host)
        self.expect_no_more(session, host)
        if self._lead.images is not None and session.restores_from_image:
            self._lead.images.came_back(session)
        former.hear_of_end()
        session.server.retired = False  # it has none, which is as good as one that died
        if session.state == "lost":
            session.fail(session.note)  # its log has not heard why
        self._own_host.follow(session)

    def _expect(self, session: Session, host: str, described: asyncio.Future[pb.RankDescription]) -> None:
        self._arriving[session.rank] = session, host, described
        self._lead.span.destinations.add(host)

    def expect_no_more(self, session: Session, host: str) -> None:
        """It has come there, or has not gone."""
        self._arriving.pop(session.rank, None)
        self._lead.span.astray.discard(session.rank)
        if all(destination != host for _, destination, _ in self._arriving.values()):
            self._lead.span.destinations.discard(host)

    async def _send(self, session: Session, destination: str, keep_source: bool) -> pb.Transfer:
        former, member = session.server, self._lead.members.get(session.host)
        retired, former.retired = former.retired, True
        if self._lead.images is not None and self._lead.lost_hosts.awaits(session):
            transfer = await self._lead.images.send(session, destination)
        elif member is None:
            try:
                transfer = await self._own_host.send(session, destination, keep_source)
            except NotMoved:
                former.retired = retired
                raise
        else:
            request = pb.MoveRankRequest(
                rank=session.rank, destination=destination, stash=keep_source,
                device=session.destination_device, **self._lead.credentials(),
            )  # fmt: skip
            try:
                reply = await member.ask("MoveRank", request, MOVE_S)
            except NotDone:
                former.retired = retired
                raise
            if reply.error:
                former.retired = retired
                raise NotMoved(reply.error)
            transfer = reply.transfer
        if keep_source:
            session.source_server = former
        else:
            former.process.hear_of_end()
        return transfer

    def _let_go(self, host: str) -> None:
        """A rank that was to go there has not, and nobody else of the job is there."""
        member = self._lead.members.get(host)
        wanted = host in self._lead.span.destinations or host not in self._for_moves
        if member is None or wanted or self._lead.of(member):
            return
        self._for_moves.discard(host)
        self._lead.let_go(member)
