"""Devices and device servers for the ranks of a job on several hosts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog

from understudy.recovery.agent_api.commands import NoPlace, NotDone
from understudy.recovery.agent_api.server import Server
from understudy.recovery.host.leases import Leases
from understudy.recovery.host.placement import HostPlacement
from understudy.recovery.host.servers import ServerPool
from understudy.recovery.spanning.leader.lead import Lead
from understudy.recovery.spanning.ranks.remote import NoDeviceThere
from understudy.recovery.state.jobs import Session

log = structlog.get_logger()

Places = Callable[[str], Mapping[str, int]]
LOOK_S = 1.0
"""Between two looks at who is awaited still: a host may be lost meanwhile, and nobody waits for it then."""


class SpanningPlacement(HostPlacement):
    """This host, and those of the members."""

    def __init__(
        self, pool: ServerPool, leases: Leases, lead: Lead, places: Places,
        cut_off: Callable[[list[str]], Awaitable[frozenset[str]]],
    ) -> None:  # fmt: skip
        """`places`: other hosts that fit a rank of one, and how many free devices each has.

        `cut_off`: which of some hosts the others do not reach where communicators meet.
        """
        super().__init__(pool, leases)
        self._lead = lead
        self._places = places
        self._cut_off = cut_off
        self._fenced: set[tuple[str, int]] = set()
        self._cut: frozenset[str] = frozenset()

    def at(self, session: Session) -> str:
        """The name of the host where it runs."""
        return session.host or self._lead.here

    async def ready(self, sessions: list[Session], suspicious: bool) -> None:
        """Until all their hosts are reached, all ranks are known, and we lead, however long that takes.

        A host is lost when the others agree on that, and never by time: a job whose hosts are cut off, or
        whose etcd is away, has lost nothing.  Who is cut off from the others has to move.
        """
        job = self._lead.job
        try:
            while awaited := self._awaited(sessions):
                waits_for = "; ".join(awaited.values())
                if waits_for != job.waits_for:
                    log.warning("a recovery waits", job=job.name, waits_for=waits_for)
                    job.waits_for = waits_for
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await next(iter(awaited)).wait()
        finally:
            job.waits_for = ""
        if suspicious:
            await self._look_at_links(sessions)

    def awaited(self, sessions: Sequence[Session]) -> str:
        """As HostPlacement."""
        return "; ".join(self._awaited(sessions).values())

    def _awaited(self, sessions: Sequence[Session]) -> dict[asyncio.Event, str]:
        """What has to come before any of these can be steered, each with a sentence."""
        lead = self._lead
        found = {}
        if lead.span.leading is not None and not lead.span.leading.holds.is_set():
            found[lead.span.leading.holds] = "this host does not lead the job for the moment (etcd is away?)"
        for host in sorted({session.host for session in sessions if session.host and session.active}):
            member = lead.members.get(host)
            if member is not None and not member.lost and not member.connected.is_set():
                found[member.connected] = f"host {host} is not reached ({member.trouble})"
        for session in sessions:
            if session.active and (arrives := lead.relocations.under_way(session)) is not None:
                found[arrives] = f"rank {session.rank} is on its way from one host to another"
        found.update(lead.attendance.sought())
        for host in sorted(lead.span.awaited):
            member = lead.members.get(host)
            if member is not None and not member.heard.is_set():
                found[member.heard] = f"host {host} has not told of its ranks ({member.trouble})"
        return found

    async def _look_at_links(self, sessions: list[Session]) -> None:
        here = [
            session for session in sessions if not session.restores_from_image
        ]  # of the others it is known
        self._cut = await self._cut_off(sorted({self.at(session) for session in here}))
        for session in sessions:
            host = self.at(session)
            if host in self._cut and session.has_state and self._destinations(session):
                log.error("a host is cut off from the data network", job=session.job.name, host=host)
                # Nobody could read its state there; a replica, or a snapshot in the log, has it.
                session.server.retired = session.lacks_state = True
                session.note = f"it left host {host}, which is cut off from the data network"

    def is_homeless(self, session: Session) -> bool:
        """Whether it needs another device."""
        if self._lead.lost_hosts.awaits(session):
            return True
        if self.at(session) in self._cut and session.lacks_state:
            return True
        if session.host:
            return (session.host, session.device_index) in self._fenced
        return super().is_homeless(session)

    def fence(self, session: Session, reason: str) -> None:
        """Its device has failed; its own host knows."""
        if session.host:
            self._fenced.add((session.host, session.device_index))
        else:
            super().fence(session, reason)

    def retire(self, server: Server) -> None:
        """End it, without waiting."""
        if not server.host:
            return super().retire(server)
        session = next(
            (one for one in self._lead.job.sessions.values() if server in (one.server, one.source_server)),
            None,
        )
        if session is not None:
            self._lead.end_server(session, server)

    async def replacement(self, session: Session, keep_source: bool) -> Server:
        """As HostPlacement."""
        wished = session.destination_host
        if wished and wished != self.at(session):
            try:
                await self._move(session, keep_source, [wished])
            except NoPlace as problem:
                session.decline(str(problem))
                raise
            keep_source = False  # if so, it is known already
        elif self.is_homeless(session) and not self._free_beside(session):
            await self._move(session, keep_source, self._destinations(session))
            keep_source = False
        return await self._replaced(session, keep_source)

    def free_devices(self) -> int:
        """That a rank whose own has failed could get."""
        homeless = [one for one in self._lead.job.active_sessions() if self.is_homeless(one)]
        hosts = {self.at(one) for one in homeless}
        away = [self._places(host) for host in hosts] if all(one.relay for one in homeless) else []
        found = {name: free for places in away for name, free in places.items() if name not in self._cut}
        # Those of its own host are among them, if another one's rank could go there.
        beside = sum(self._free_beside(one) > 0 for one in homeless)
        return super().free_devices() + max(sum(found.values()), beside)

    def _free_beside(self, session: Session) -> int:
        """Devices of its own host."""
        host = self.at(session)
        if host in self._cut:
            return 0
        return self._places(self._lead.here).get(host, 0) if session.host else len(self._leases.free())

    def _destinations(self, session: Session) -> list[str]:
        """Other hosts with a device for it, those of the job first."""
        if not session.relay:
            return []
        host, here = self.at(session), self._lead.here
        places = {name for name, free in self._places(host).items() if free and name != host}
        if session.host and self._leases.free():
            places.add(here)
        members = self._lead.span.members | {here}
        return sorted(places - self._cut, key=lambda name: (name not in members, name))

    async def _move(self, session: Session, keep_source: bool, destinations: Sequence[str]) -> None:
        """To the first host that takes it; raises NoPlace."""
        problems = []
        for name in destinations:
            try:
                await self._lead.relocations.move(session, name, keep_source)
                return
            except NotDone as problem:
                problems.append(str(problem))
                if not session.worker.running:
                    break
        none = f"{session.device} of rank {session.rank} is gone, and no other is free"
        raise NoPlace("; ".join(problems) or none)

    def room_for(self, sessions: Sequence[Session]) -> bool:
        """Whether all of these, whose hosts are lost, find a device elsewhere."""
        places = {name: free for one in sessions for name, free in self._places(one.host).items()}
        return sum(places.values()) + len(self._leases.free()) >= len(sessions)

    def choose(self, session: Session) -> str:
        """Another host for it; empty: there is none."""
        return next(iter(self._destinations(session)), "")

    async def _replaced(self, session: Session, keep_source: bool) -> Server:
        if not session.host:
            return await super().replacement(session, keep_source)
        try:
            return await self._lead.replace(session, keep_source)
        except NotDone as problem:
            if isinstance(problem, NoDeviceThere):
                self._fenced.add((session.host, session.device_index))
            raise NoPlace(f"rank {session.rank} got no new device server: {problem}") from problem

    def could_serve(self, source: Server, session: Session) -> bool:
        """As HostPlacement; never from another host, where the log has ended."""
        return source.host == session.host and super().could_serve(source, session)

    def arrive(self, session: Session) -> None:
        """As HostPlacement."""
        session.destination_host = session.destination_device = ""
        if not session.host:
            super().arrive(session)

    def read_from(self, holder: Server, reader: Session) -> str:
        """As HostPlacement; between hosts over the data network."""
        if holder.host == reader.host:
            return f"unix:{holder.socket}"
        return f"tls:{holder.host or self._lead.here}@{holder.data_address}"
