"""`torchrun --nnodes=2` below relays: ranks of both hosts share the store of whoever leads the job."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from etcd_server import free_port
from linked_hosts import Host, Span
from proxied import WORKLOADS, until
from training_run import installed

from understudy.recovery.membership.network.certificates import issue, load, make_authority
from understudy.recovery.membership.network.links import Links
from understudy.recovery.rendezvous.forwarder import Leader, StoreForwarder
from understudy.recovery.rendezvous.services import PeerStoreService
from understudy.recovery.rendezvous.worker_store import SOCKET, WorkerStore

pytestmark = pytest.mark.drawn(2)

SCRIPT = WORKLOADS / "migration" / "shared_store.py"
LONG_S = 120.0


class TwoHosts:
    """Host a, which leads job j, and host b: what their proxyds serve, in a thread of this process."""

    def __init__(self, folder: Path, *, spans: bool) -> None:
        self.folder, self._spans = folder, spans
        self.stores: dict[str, WorkerStore] = {}
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    def relays(self, host: str) -> Path:
        return self.folder / host

    async def _serve(self) -> None:
        certs = self.folder / "certs"
        make_authority(certs, "tests")
        for host in "ab":
            issue(certs, host)
            self.relays(host).mkdir(mode=0o700)
        a = Host(certs, "a")
        links = Links({"a": a.record}.get, load(certs, "b"))
        span = Span()
        span.leader = Leader("a", links.to("a"))
        spans = (lambda: True) if self._spans else (lambda: False)
        leading = WorkerStore(self.relays("a"), "j", spans=spans)
        self.stores = {
            "a": leading,
            "b": WorkerStore(self.relays("b"), "j", StoreForwarder(span.where), spans),
        }
        await a.start(PeerStoreService(a.store, Span(), {"j": leading}.get))
        serving = [asyncio.create_task(store.run()) for store in self.stores.values()]
        await self._stop.wait()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        await links.close()
        await a.stop()

    def __enter__(self) -> TwoHosts:
        self._thread.start()
        until(lambda: all((self.relays(host) / SOCKET).exists() for host in "ab"), "both serve")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()


def agent(hosts: TwoHosts, number: int, port: int, ranks: int) -> subprocess.Popen[str]:
    """torchrun of one of two hosts."""
    return subprocess.Popen(
        [*installed("torchrun"), "--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", str(ranks),
         "--master-addr", "127.0.0.1", "--master-port", str(port), str(SCRIPT), str(hosts.folder)],
        env=os.environ | {"UNDERSTUDY_RELAYS": str(hosts.relays("ab"[number])), "UNDERSTUDY_RELAY": "it",
                          "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def answers(hosts: TwoHosts, ranks: int) -> Iterator[dict[str, Any]]:
    port = free_port()
    agents = [agent(hosts, number, port, ranks) for number in (0, 1)]
    for one in agents:
        output, _ = one.communicate(timeout=LONG_S)
        assert one.returncode == 0, output
    for rank in range(2 * ranks):
        yield json.loads((hosts.folder / f"rank-{rank}").read_text())


def test_ranks_of_two_hosts_share_one_store_and_hold_no_connection(tmp_path: Path) -> None:
    with TwoHosts(tmp_path, spans=True) as hosts:
        for answer in answers(hosts, 2):
            assert answer["heard"] == [f"hello of {rank}" for rank in range(4)]
            assert answer["total"] == 10 and answer["connections"] == []
        assert len(hosts.stores["b"].store) == 0 < len(hosts.stores["a"].store)


def test_ranks_of_a_job_that_does_not_span_hosts_meet_as_torch_has_it(tmp_path: Path) -> None:
    with TwoHosts(tmp_path, spans=False) as hosts:
        for answer in answers(hosts, 1):
            assert answer["total"] == 3 and answer["connections"]
        assert len(hosts.stores["a"].store) == len(hosts.stores["b"].store) == 0
