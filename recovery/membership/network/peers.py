"""Asking other hosts: whether they are there, and whom they reach."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Mapping
from typing import Any

import grpc
import grpc.aio

from understudy.recovery.base.control import pb, ran_out, rpc
from understudy.recovery.membership.network.certificates import Credentials, host_files
from understudy.recovery.planning.agreement import Vote

CONNECT_S = 2.0
ANSWER_S = 2.0
ASK_S = CONNECT_S + ANSWER_S + 1.0
"""For a peer that has to ask itself."""
OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", 1 << 20),
    ("grpc.min_reconnect_backoff_ms", 60_000),  # the deadline of the call ends it
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]
_OF_TLS = {
    9: "its certificate is not valid yet: compare the clocks",
    10: "its certificate has expired",
    18: "its certificate is another authority's",
    19: "its certificate is another authority's",
    20: "its certificate is another authority's",
    62: "its certificate is for another host",
}
"""OpenSSL's X509_V_ERR_*."""
_REFUSED = "it refuses our certificate, as another authority's or not valid by its clock"
_HANGS = "it accepts connections, and does not answer"


class TlsPeers:
    """The others, by their certificates."""

    def __init__(self, here: str, credentials: Credentials) -> None:
        self._here = here
        self._credentials = credentials
        self._secret = grpc.ssl_channel_credentials(
            credentials.authority, credentials.key, credentials.certificate
        )

    async def reach(self, target: pb.HostRecord) -> Vote:
        """Whether we do.

        It is not reached if its machine gives no answer.  One that refuses, or whose proxyd hangs or shows a
        wrong certificate, may still run ranks: that says neither.
        """
        host, _, port = target.address.rpartition(":")
        if not host or not port.isascii() or not port.isdigit():
            return Vote(None, f"{target.name} has no --listen")
        try:
            async with asyncio.timeout(CONNECT_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except ConnectionRefusedError:
            return Vote(None, f"the machine of {target.name} answers, its proxyd does not")
        except (OSError, TimeoutError, OverflowError) as problem:
            return Vote(False, getattr(problem, "strerror", None) or f"no answer within {CONNECT_S:g} s")
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        try:
            reply = await self._call(target, "Ping", pb.PingRequest(), ANSWER_S)
        except grpc.RpcError as problem:
            if ran_out(problem):
                return Vote(None, f"{target.name} cannot be asked: {_HANGS}")
            why = await asyncio.to_thread(self.explain, host.strip("[]"), int(port), target.name)
            return Vote(None, f"{target.name} cannot be asked: {why}")
        return (
            Vote(True) if reply.host == target.name else Vote(None, f"{target.name} calls itself otherwise")
        )

    async def votes(self, target: pb.HostRecord, others: Mapping[str, pb.HostRecord]) -> Mapping[str, Vote]:
        """As Peers: ours and those of the others, all asked at once."""
        asked = [self.reach(target), *(self._ask(record, target.name) for record in others.values())]
        return dict(zip([self._here, *others], await asyncio.gather(*asked), strict=True))

    async def _ask(self, peer: pb.HostRecord, target: str) -> Vote:
        if not peer.address:
            return Vote(None, f"{peer.name} has no --listen")
        try:
            reply = await self._call(peer, "AskReach", pb.ReachRequest(host=target), ASK_S)
        except grpc.RpcError:
            return Vote(None, f"{peer.name} cannot be asked")
        answers: dict[str, bool | None] = {"reached": True, "not reached": False}
        return Vote(answers.get(reply.answer), reply.why if reply.why.isprintable() else "")

    async def _call(self, peer: pb.HostRecord, method: str, request: Any, within_s: float) -> Any:
        """Over a connection of its own: hosts are asked seldom, and none that broke is to be met again.

        The certificate must be that of the host, whatever its address is.
        """
        options = [*OPTIONS, ("grpc.ssl_target_name_override", peer.name)]
        async with grpc.aio.secure_channel(peer.address, self._secret, options=options) as channel:
            return await getattr(rpc.HostsStub(channel), method)(request, timeout=within_s)

    def explain(self, address: str, port: int, name: str) -> str:
        """Why TLS did not come about, which gRPC does not say: a handshake of our own; blocks."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_alpn_protocols(["h2"])
        try:
            context.load_verify_locations(cadata=self._credentials.authority.decode())
            context.load_cert_chain(*host_files(self._credentials.directory, self._credentials.host))
            with (
                socket.create_connection((address, port), CONNECT_S) as plain,
                context.wrap_socket(plain, server_hostname=name) as secure,
            ):
                # With TLS 1.3 a server refuses a certificate behind the handshake; gRPC's does not say so.
                return "it answers in another way than a proxyd" if secure.recv(1) else _REFUSED
        except ssl.SSLCertVerificationError as problem:
            return _OF_TLS.get(problem.verify_code, problem.verify_message)
        except TimeoutError:
            return _HANGS
        except ConnectionResetError:
            return _REFUSED
        except ssl.SSLError as problem:
            return f"TLS failed: {problem.reason or problem}"
        except OSError as problem:
            return f"the connection broke: {problem.strerror or problem}"
