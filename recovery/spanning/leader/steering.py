"""What a leader tells device servers of other hosts, and orders by the control pages of their ranks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import structlog
from google.protobuf.message import DecodeError, Message

from understudy.protos import control_pb2 as pb
from understudy.recovery.agent_api.commands import NotDone, command_of
from understudy.recovery.agent_api.server import Server
from understudy.recovery.base.background import Complaints
from understudy.recovery.state.jobs import Session

if TYPE_CHECKING:
    from understudy.recovery.spanning.leader.lead import Lead

log = structlog.get_logger()

ORDERS_S = 0.02
"""How often what is ordered by a control page is passed on."""
ASK_S = 10.0
MORE_S = 5.0
"""Beyond its own deadline, a request to a device server takes on its way."""


class Steering:
    """Steers the device servers of one job on other hosts."""

    def __init__(self, lead: Lead) -> None:
        self._lead = lead
        self._served: WeakKeyDictionary[Server, Session] = WeakKeyDictionary()
        """Which rank a server had when it was last asked for."""

    def _session(self, server: Server) -> Session | None:
        known = self._served.get(server)
        if known is None or server not in (known.server, known.source_server):
            sessions = self._lead.job.sessions.values()
            known = next((one for one in sessions if server in (one.server, one.source_server)), None)
            if known is not None:
                self._served[server] = known
        return known

    async def execute(self, server: Server, command: Message, within_s: float | None = None) -> Any:
        """By the member where that server is; raises NotDone."""
        lead, known = self._lead, command_of(command)
        seconds = known.within_s if within_s is None else within_s
        session = self._session(server)
        if session is None:
            raise NotDone("that device server serves no rank any more")
        # What its rank has left behind on another host knows no more of it.
        mirror = lead.mirrors.get(session) if server.host == session.host else None
        orders = mirror.orders() if mirror is not None else b""
        steer = pb.SteerRequest(
            rank=session.rank, server=server.process.message(), method=known.method,
            request=command.SerializeToString(), timeout_s=seconds, orders=orders, **lead.credentials(),
        )  # fmt: skip
        reply = await lead.members[server.host].ask("Steer", steer, seconds + MORE_S)
        if mirror is not None:
            mirror.sent(orders)
        if mirror is not None and lead.mirrors.get(session) is mirror and reply.HasField("news"):
            lead.took(session, reply.news)
        if reply.error:
            raise NotDone(reply.error, late=reply.ran_out)
        try:
            return known.reply.FromString(reply.reply)
        except DecodeError:
            raise NotDone(f"what host {server.host} answers to {known.method} cannot be read") from None

    async def flush(self, session: Session) -> None:
        """What is ordered by its control page; raises NotDone."""
        mirror = self._lead.mirrors.get(session)
        orders = mirror.orders() if mirror is not None else b""
        if mirror is None or not orders:
            return
        request = pb.SteerRequest(rank=session.rank, orders=orders, **self._lead.credentials())
        await self._lead.members[session.host].ask("Steer", request, ASK_S)
        mirror.sent(orders)

    async def pass_orders_on(self) -> None:
        """Until cancelled."""
        complaints = Complaints("orders")
        while True:
            for session in list(self._lead.mirrors):
                member = self._lead.members.get(session.host)  # it may have come here meanwhile
                if member is not None and member.connected.is_set() and session.worker.running:
                    with complaints.survived(self._lead.job.name):
                        try:
                            await self.flush(session)
                        except NotDone as problem:
                            log.debug("orders wait", host=session.host, problem=str(problem))
            await asyncio.sleep(ORDERS_S)
