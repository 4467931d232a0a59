"""What a leader does with sessions of its own host."""

from __future__ import annotations

import asyncio
from pathlib import Path

from understudy import replay
from understudy.protos import control_pb2 as pb
from understudy.recovery.agent.host_agent import HostAgent
from understudy.recovery.agent_api.commands import NotDone
from understudy.recovery.agent_api.server import AbsentServer
from understudy.recovery.base.errors import Refused
from understudy.recovery.job_hosts.arrivals import Arrivals
from understudy.recovery.job_hosts.migration import Migration
from understudy.recovery.machine.processes import Watched
from understudy.recovery.spanning.ranks.remote import NotMoved
from understudy.recovery.state.jobs import Session


class LeadingHost:
    """The host of a leader, for all jobs that it leads."""

    def __init__(self, agent: HostAgent, migration: Migration, arrivals: Arrivals) -> None:
        self._agent, self._migration, self._arrivals = agent, migration, arrivals

    def take_remote(self, session: Session) -> None:
        """It has opened on another host."""
        self._agent.remote_ranks.take_remote(session)

    def tell(self, report: pb.FaultReport) -> None:
        """A device server's report."""
        self._agent.remote_ranks.tell(report)

    def follow(self, session: Session) -> None:
        """Its server is another one."""
        self._agent.follow(session)

    def note(self) -> None:
        """For whoever leads after us."""
        self._agent.note()

    async def send(self, session: Session, destination: str, keep_source: bool) -> pb.Transfer:
        """Raises NotMoved."""
        try:
            return await self._migration.send(session, destination, keep_source, session.destination_device)
        except Refused as refusal:
            raise NotMoved(str(refusal)) from refusal

    def leaves_here(self, session: Session) -> None:
        """Its device is free, if it is sound."""
        self._agent.leases.release(session)
        session.worker.ended.set()
        session.worker.close()

    def expect(self, session: Session) -> asyncio.Future[tuple[Path, int, str]]:
        """It comes here."""
        return self._arrivals.expect(session.job.name, session.rank)

    def leaves_remote(self, session: Session, directory: Path, pid: int, relay: str) -> None:
        """It has come; raises NotDone and LogError."""
        page = replay.Log(str(directory))
        try:
            index, device = self._arrivals.take_device(session.destination_device)
            worker = Watched(pid)
        except (Refused, ProcessLookupError) as problem:
            page.lose(f"it came to a host that cannot have it: {problem}")
            raise NotDone(str(problem)) from problem
        session.host, session.log, session.directory, session.worker = "", page, directory, worker
        session.device_index, session.device, session.relay = index, device, relay
        session.server, session.lacks_state = AbsentServer(device), True
        self._agent.leases.hold(session)
