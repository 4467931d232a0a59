"""What other hosts may ask this one, at --listen: TLS, and a certificate of the cluster's authority."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from understudy.recovery.base.control import pb, rpc
from understudy.recovery.base.errors import BadInput
from understudy.recovery.membership.network.certificates import Credentials
from understudy.recovery.membership.network.links import LARGEST_MESSAGE
from understudy.recovery.planning.agreement import Vote

MOST_AT_ONCE = 1024
"""Requests, most of which wait for a key (recovery/rendezvous/services.py); whoever is beyond is refused."""
OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", LARGEST_MESSAGE),
    ("grpc.max_send_message_length", LARGEST_MESSAGE),
    ("grpc.http2.min_ping_interval_without_data_ms", 2000),
    ("grpc.http2.max_ping_strikes", 0),  # other hosts ask often whether the link is there
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 0),  # two that listen at one port are a mistake
]


class HostsService(rpc.HostsServicer):  # type: ignore[misc]
    """Its answers."""

    def __init__(
        self,
        cluster: str,
        record: Callable[[], pb.HostRecord],
        reach: Callable[[str], Awaitable[Vote]],
    ) -> None:
        """`record`: of this host; `reach`: whether it reaches another, by name."""
        self._cluster = cluster
        self._record = record
        self._reach = reach

    async def Ping(self, request: Any, context: Any) -> pb.PingReply:
        record = self._record()
        return pb.PingReply(host=record.name, cluster=self._cluster, instance=record.instance)

    async def AskReach(self, request: Any, context: Any) -> pb.ReachReply:
        vote = await self._reach(request.host)
        answer = {True: "reached", False: "not reached", None: ""}[vote.reaches]
        return pb.ReachReply(answer=answer, why=vote.why)


AddService = Callable[[grpc.aio.Server], None]


async def listen(
    address: str, credentials: Credentials, service: HostsService, more: Sequence[AddService] = ()
) -> grpc.aio.Server:
    """Serve these until it is stopped; raises BadInput if the address cannot be had."""
    server = grpc.aio.server(options=OPTIONS, maximum_concurrent_rpcs=MOST_AT_ONCE)
    rpc.add_HostsServicer_to_server(service, server)
    for add in more:
        add(server)
    secret = grpc.ssl_server_credentials(
        [(credentials.key, credentials.certificate)], credentials.authority, require_client_auth=True
    )
    try:
        server.add_secure_port(address, secret)
    except RuntimeError as problem:
        raise BadInput(f"cannot listen at {address}: it is in use, or no address of this host") from problem
    await server.start()
    return server
