"""A device server's communicator on one of two hosts, and the store that its proxyd serves or passes on.

RANK HOST DATA_ADDRESS CERTS LEADER_PLACE, where host a leads job j; prints sum and peers.
"""

import asyncio
import json
import sys
import tempfile
import threading
from pathlib import Path

import grpc.aio
import psutil
import torch

from understudy.proxy_server.backends import BackendFactory
from understudy.proxy_server.daemon_channel import daemon_channel
from understudy.proxy_server.rendezvous_store import RendezvousGate
from understudy.recovery.base.control import address, pb, rpc
from understudy.recovery.membership.network.certificates import load
from understudy.recovery.membership.network.endpoint import HostsService, listen
from understudy.recovery.membership.network.links import Links
from understudy.recovery.rendezvous.forwarder import Leader
from understudy.recovery.rendezvous.services import PeerStoreService, RendezvousService
from understudy.recovery.rendezvous.store import Store

rank, host, data_address, certs, place = int(sys.argv[1]), *sys.argv[2:6]
credentials = load(Path(certs), host)
socket = Path(tempfile.mkdtemp()) / "s"  # in TMPDIR, which the test removes
serving = threading.Event()


class LedByA:
    """Job j of hosts a and b."""

    def __init__(self, leader: Leader | None) -> None:
        self._leader = leader

    def where(self, job: str) -> Leader | None:
        return self._leader

    def spans(self, job: str) -> bool:
        return True

    def admits(self, job: str, host: str) -> str:
        return "" if (job, host) == ("j", "b") else "it has no part in that job"


def plain(ip: str) -> str:
    """Without what gRPC's sockets put before an IPv4 address."""
    return ip.removeprefix("::ffff:")


async def serve() -> None:
    leader = pb.HostRecord(name="a", address=place)
    links = Links({"a": leader}.get, credentials)
    store, span = Store(), LedByA(None if host == "a" else Leader("a", links.to("a")))
    kept = None  # a server that nobody holds is stopped
    if host == "a":
        peers_store = PeerStoreService(store, span)
        hosts = HostsService("tests", lambda: leader, None)  # type: ignore[arg-type]
        kept = await listen(
            place, credentials, hosts, [lambda one: rpc.add_MeetingServicer_to_server(peers_store, one)]
        )
    local = grpc.aio.server()
    rpc.add_RendezvousServicer_to_server(RendezvousService(store, span.where), local)
    local.add_insecure_port(address(socket))
    await local.start()
    serving.set()
    await asyncio.Event().wait()
    assert kept


threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
serving.wait()
gate = RendezvousGate()
gate.begin()
factory = BackendFactory(daemon_channel(socket), "cpu", gate, data_address)
factory.job = "j"
group = factory("world", 1, rank, 2, 60_000)
tensor = torch.full((1 << 16,), float(rank + 1))
group.allreduce([tensor]).wait()
here = [one for one in psutil.Process().net_connections("inet") if one.status != "NONE"]
listening = sorted({plain(one.laddr.ip) for one in here if one.status == "LISTEN"})
peers = sorted({(plain(one.laddr.ip), plain(one.raddr.ip)) for one in here if one.status == "ESTABLISHED"})
print(json.dumps({"sum": tensor.unique().tolist(), "listening": listening, "peers": peers}), flush=True)
sys.stdin.read()  # so that the other still has its peer
