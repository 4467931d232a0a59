"""What other hosts may ask this one, at --listen: TLS, and a certificate of the cluster's authority."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from recovery.control import pb, rpc
from recovery.membership.agreement import Vote
from recovery.membership.certificates import Credentials
from recovery.settings import BadInput

MOST_AT_ONCE = 64
"""Requests; whoever is beyond waits for none."""
OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", 1 << 20),
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

    async def DescribeHost(self, request: Any, context: Any) -> pb.HostRecord:
        return self._record()

    async def AskReach(self, request: Any, context: Any) -> pb.ReachReply:
        vote = await self._reach(request.host)
        answer = {True: "reached", False: "not reached", None: ""}[vote.reaches]
        return pb.ReachReply(answer=answer, why=vote.why)


async def listen(address: str, credentials: Credentials, service: HostsService) -> grpc.aio.Server:
    """Serve until it is stopped; raises BadInput if the address cannot be had."""
    server = grpc.aio.server(options=OPTIONS, maximum_concurrent_rpcs=MOST_AT_ONCE)
    rpc.add_HostsServicer_to_server(service, server)
    secret = grpc.ssl_server_credentials(
        [(credentials.key, credentials.certificate)], credentials.authority, require_client_auth=True
    )
    try:
        server.add_secure_port(address, secret)
    except RuntimeError as problem:
        raise BadInput(f"cannot listen at {address}: it is in use, or no address of this host") from problem
    await server.start()
    return server
