"""Hosts of a job in one process: each with an endpoint that speaks TLS, and whom they take for its leader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc.aio
from etcd_server import free_port

from understudy.recovery.base.control import pb, rpc
from understudy.recovery.membership.network.certificates import load
from understudy.recovery.membership.network.endpoint import HostsService, listen
from understudy.recovery.membership.network.links import NoLink
from understudy.recovery.rendezvous.forwarder import Leader
from understudy.recovery.rendezvous.services import PeerStoreService
from understudy.recovery.rendezvous.store import Store


class Span:
    """Job j of hosts a, b and c; who leads it is for the test to say."""

    def __init__(self) -> None:
        self.leader: Leader | str | None = "nobody leads it"

    def where(self, job: str) -> Leader | None:
        if isinstance(self.leader, str):
            raise NoLink(self.leader)
        return self.leader

    def spans(self, job: str) -> bool:
        return True

    def admits(self, job: str, host: str) -> str:
        return "" if job == "j" and host in "abc" else f"host {host} has no part in job {job}"


class Host:
    """That serves the stores of jobs to others, as proxyd does at --listen."""

    def __init__(self, certs: Path, name: str) -> None:
        self.name, self._credentials = name, load(certs, name)
        self.store = Store()
        self.record = pb.HostRecord(name=name, address=f"127.0.0.1:{free_port()}")
        self.server: grpc.aio.Server | None = None

    async def start(self, service: Any = None) -> None:
        peers_store = service or PeerStoreService(self.store, Span())
        hosts = HostsService("tests", lambda: self.record, None)  # type: ignore[arg-type]
        self.server = await listen(
            self.record.address, self._credentials, hosts,
            [lambda server: rpc.add_MeetingServicer_to_server(peers_store, server)],
        )  # fmt: skip

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(0)
