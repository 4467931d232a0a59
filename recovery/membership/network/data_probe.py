"""Who reaches whom over the data network: each proxyd listens there, too, and tries the others when asked.

The network over which proxyds talk may be sound while that of communicators is cut.  A ping is one line over
TLS 1.3, both sides with certificates; what a host sees it tells over the network that it is asked by.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import structlog

from understudy.recovery.base.control import answer, pb, rpc, trouble
from understudy.recovery.base.errors import BadInput
from understudy.recovery.membership.network.certificates import Credentials, host_files
from understudy.recovery.membership.network.data_network import interface_of
from understudy.recovery.membership.network.links import Links, NoLink
from understudy.recovery.membership.settings import is_name
from understudy.recovery.planning.link_judgement import CARRIER_DOWN, Matrix, Seen

log = structlog.get_logger()

PING_S = 1.3
PROBE_S = 2.0
MOST_HOSTS = 256
"""In one request."""
MOST_AT_ONCE = 64
"""Connections; whoever is beyond is not answered."""
LONGEST_LINE = 128
_ASK = b"understudy\n"
_SYSTEM = Path("/sys/class/net")
_VOTES: dict[str, bool | None] = {"reached": True, "not reached": False}


class DataProbe(rpc.DataProbeServicer):  # type: ignore[misc]
    """Tries the data network from one host."""

    def __init__(
        self,
        here: str,
        address: str,
        credentials: Credentials,
        known: Callable[[str], pb.HostRecord | None],
        links: Links,
    ) -> None:
        """`known`: what is registered of a host; `links`: to ask the others."""
        self._here, self._address = here, address
        self._credentials = credentials
        self._known = known
        self._links = links
        self._server: asyncio.Server | None = None
        self._open = 0
        self.port = 0

    async def start(self) -> None:
        """Listen at the data address; raises BadInput."""
        try:
            self._server = await asyncio.start_server(
                self._serve, self._address, 0, ssl=self._context(ssl.PROTOCOL_TLS_SERVER), limit=LONGEST_LINE,
                ssl_handshake_timeout=PING_S, ssl_shutdown_timeout=PING_S,
            )  # fmt: skip
        except OSError as problem:
            raise BadInput(
                f"cannot listen at --data-address {self._address}: {problem.strerror}"
            ) from problem
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()

    def add_to(self, server: grpc.aio.Server) -> None:
        """What other hosts may ask."""
        rpc.add_DataProbeServicer_to_server(self, server)

    # -------------------------------------------------------- asking
    async def probe(self, hosts: Sequence[str]) -> Matrix:
        """What each of these tells, within PROBE_S; those that do not answer are left out."""
        told = await asyncio.gather(*(self._ask(host, hosts) for host in hosts))
        return {host: seen for host, seen in zip(hosts, told, strict=True) if seen is not None}

    async def _ask(self, host: str, hosts: Sequence[str]) -> Seen | None:
        others = [other for other in hosts if other != host]
        if host == self._here:
            return await self.look(others)
        try:
            stub = rpc.DataProbeStub(self._links.to(host))
            reply = await answer(stub.TryReach(pb.TryReachRequest(hosts=others), timeout=PROBE_S))
        except (NoLink, grpc.RpcError) as problem:
            why = trouble(problem) if isinstance(problem, grpc.RpcError) else str(problem)
            log.debug("a host does not tell whom it reaches", host=host, why=why)
            return None
        votes = {one.host: _VOTES.get(one.answer) for one in reply.reaches if one.host in others}
        return Seen(votes, reply.carrier if reply.carrier in ("up", CARRIER_DOWN) else "")

    async def TryReach(self, request: Any, context: Any) -> pb.TryReachReply:
        if len(request.hosts) > MOST_HOSTS or not all(is_name(host) for host in request.hosts):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"names of at most {MOST_HOSTS} hosts are expected"
            )
        seen = await self.look(list(dict.fromkeys(request.hosts)))
        words = {vote: word for word, vote in _VOTES.items()}
        return pb.TryReachReply(
            carrier=seen.carrier,
            reaches=[
                pb.DataReach(host=one, answer=words.get(vote, "")) for one, vote in seen.reaches.items()
            ],
        )

    async def look(self, hosts: Sequence[str]) -> Seen:
        """What this host sees of these, and of its own interface."""
        votes = await asyncio.gather(*(self._reach(host) for host in hosts))
        return Seen(dict(zip(hosts, votes, strict=True)), carrier_of(interface_of(self._address)))

    async def _reach(self, host: str) -> bool | None:
        """A machine that refuses, or shows a wrong certificate, says neither: something answers there."""
        record = self._known(host)
        if record is None or not record.data_address or not 0 < record.data_port < 1 << 16:
            return None
        try:
            async with asyncio.timeout(PING_S):
                reader, writer = await asyncio.open_connection(
                    record.data_address, record.data_port, ssl=self._context(ssl.PROTOCOL_TLS_CLIENT),
                    server_hostname=host, limit=LONGEST_LINE,
                )  # fmt: skip
                with contextlib.closing(writer.transport):
                    writer.write(_ASK)
                    told = await reader.readline()
        except (ConnectionRefusedError, ConnectionResetError, ssl.SSLError, ValueError):
            return None
        except (OSError, TimeoutError):
            return False
        return True if told == f"{host}\n".encode() else None

    # -------------------------------------------------------- being asked
    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= MOST_AT_ONCE:
                async with asyncio.timeout(PING_S):
                    if await reader.readline() == _ASK:
                        writer.write(f"{self._here}\n".encode())
                        await writer.drain()
        except (OSError, ValueError, TimeoutError, ssl.SSLError) as problem:  # ValueError: no end of a line
            log.debug("a ping made no sense", problem=str(problem))
        finally:
            self._open -= 1
            writer.close()

    def _context(self, side: Any) -> ssl.SSLContext:
        """Both sides show a certificate of the cluster's authority."""
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self._credentials.authority.decode())
        context.load_cert_chain(*host_files(self._credentials.directory, self._credentials.host))
        return context


def carrier_of(interface: str, system: Path = _SYSTEM) -> str:
    """ "up" or "down" as the kernel tells, empty if it does not; an address that no interface has is down."""
    if not interface:
        return CARRIER_DOWN
    try:
        if (system / interface / "operstate").read_text().strip() in (CARRIER_DOWN, "lowerlayerdown"):
            return CARRIER_DOWN
        return "up" if (system / interface / "carrier").read_text().strip() == "1" else CARRIER_DOWN
    except FileNotFoundError:
        return ""
    except OSError:  # as of an interface that was switched off
        return CARRIER_DOWN
