"""Real communicators: Gloo for the ``cpu`` driver, NCCL for ``cuda``, by PyTorch's calls or by our own."""

from __future__ import annotations

import datetime
import os

import grpc
import torch.distributed as dist

from understudy.proxy_server import _server
from understudy.proxy_server.rendezvous_store import RendezvousGate, RendezvousStore

MEETING = "meet"
"""In the place of a generation: keys of members that are there, with their generations and ranks."""
ENVIRONMENT = {"GLOO_ENABLE_STORE_V2_API": "1"}
"""Variables of device servers. Gloo asks for the addresses of all peers at once, and not twice for each."""
CONNECT_TIMEOUT_MS = 15_000
"""How long members of a communicator take to connect once all have come; a dead peer is known long before."""


class BackendFactory:
    """Connects communicators through proxyd's store, one generation after the other."""

    def __init__(
        self, channel: grpc.Channel, driver: str, gate: RendezvousGate, address: str, *, own: bool = False
    ) -> None:
        """`address`: IP of the interface on which peers meet; reachable from nowhere else.  `own`: NCCL is
        called by csrc/nccl, and not by PyTorch's ProcessGroupNCCL."""
        self._channel = channel
        self._driver = driver
        self._gate = gate
        self._address = address
        self._own = own
        # C++ holds them too, but their Python half must live as long.
        self._stores: list[RendezvousStore] = []
        self._former: list[RendezvousStore] = []
        self.job, self.rank = "", 0

    def forget(self) -> None:
        """The communicators of a generation go; those before them have gone, and so may their stores."""
        self._former, self._stores = self._stores, []

    def __call__(self, uid: str, generation: int, rank: int, size: int, timeout_ms: int) -> dist.ProcessGroup:
        timeout = datetime.timedelta(milliseconds=max(timeout_ms, 1000))
        # As long as the program lets a collective take: a peer's program may be late.
        wait_ms = int(timeout.total_seconds() * 1000)
        # NCCL refuses two ranks on one GPU. Gloo takes CUDA tensors and stages them through the host itself.
        nccl = self._driver == "cuda" and os.environ.get("UNDERSTUDY_TEST_SHARED_GPU") != "1"
        # Before it has met anyone: whoever comes last is waited for by all.
        device = None if nccl else dist.ProcessGroupGloo.create_device(hostname=self._address)
        meeting = RendezvousStore(
            self._channel, self._gate, f"{self.job}/{MEETING}/{uid}", wait_ms, exchanges=True
        )
        newest = newest_generation(meeting, rank, size, generation, self.rank)
        # Of NCCL's members one tells, and the others ask. Two of them may do so much later, for messages.
        connect_ms = wait_ms if nccl else CONNECT_TIMEOUT_MS
        store = RendezvousStore(
            self._channel, self._gate, f"{self.job}/{newest}/{uid}", connect_ms, exchanges=not nccl
        )
        self._stores.append(store)
        if nccl and self._own:
            return _server.own_collectives(store, rank, size, wait_ms)
        return self._gate.run(lambda: _connect(store, rank, size, timeout, device))


def _connect(
    store: RendezvousStore, rank: int, size: int, timeout: datetime.timedelta, device: object | None
) -> dist.ProcessGroup:
    """By Gloo through `device`, or by PyTorch's NCCL if there is none."""
    if device is None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [device]
    options._timeout = datetime.timedelta(milliseconds=CONNECT_TIMEOUT_MS)
    options._threads = 2
    backend = gloo(store, rank, size, options)
    backend._set_default_timeout(timeout)
    return backend


def newest_generation(store: dist.Store, member: int, size: int, generation: int, rank: int) -> int:
    """Wait for all members of a communicator; answers the newest of their generations, which is its own.

    Those of ranks that had no communicator in common before may differ, as a recovery concerns only ranks
    that have.  Each writes a key of its own, with its `rank` in the job: it can do so twice, if it does not
    know whether a proxyd that died did it.  That of a rank that goes back is withdrawn
    (recovery/rendezvous/store.py), so what was read may be old, and is read again unless all say the same.
    """
    store.set(str(member), f"{generation} {rank}")
    before: list[bytes] = []
    while True:
        posts = store.multi_get([str(one) for one in range(size)])
        told = {int(post.split()[0]) for post in posts}
        if told == {generation} or posts == before:
            return max(told)
        before = posts
