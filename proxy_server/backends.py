"""Real communicators: Gloo for the ``cpu`` driver, NCCL for ``cuda``."""

from __future__ import annotations

import datetime

import grpc
import torch.distributed as dist

from understudy.proxy_server.rendezvous_store import RendezvousGate, RendezvousStore

CONNECT_TIMEOUT_MS = 15_000
"""How long members of a communicator take to connect once all have come; a dead peer is known long before."""


class BackendFactory:
    """Connects communicators through proxyd's store, one generation after the other."""

    def __init__(self, channel: grpc.Channel, driver: str, gate: RendezvousGate, address: str) -> None:
        """`address`: IP of the interface on which peers meet; reachable from nowhere else."""
        self._channel = channel
        self._driver = driver
        self._gate = gate
        self._address = address
        self._stores: list[
            RendezvousStore
        ] = []  # C++ holds them too, but their Python half must live as long
        self.job = ""

    def forget(self) -> None:
        """The communicators of a generation are gone; so may their stores."""
        self._stores.clear()

    def __call__(self, uid: str, generation: int, rank: int, size: int, timeout_ms: int) -> dist.ProcessGroup:
        prefix = f"{self.job}/{generation}/{uid}"
        store = RendezvousStore(self._channel, self._gate, prefix, CONNECT_TIMEOUT_MS)
        self._stores.append(store)
        timeout = datetime.timedelta(milliseconds=max(timeout_ms, 1000))
        _meet(store, rank, size, timeout)
        return self._gate.run(lambda: self._connect(store, rank, size, timeout))

    def _connect(
        self, store: RendezvousStore, rank: int, size: int, timeout: datetime.timedelta
    ) -> dist.ProcessGroup:
        if self._driver == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(store, rank, size, options)
        gloo = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self._address)]
        options._timeout = datetime.timedelta(milliseconds=CONNECT_TIMEOUT_MS)
        options._threads = 2
        backend = gloo(store, rank, size, options)
        backend._set_default_timeout(timeout)
        return backend


def _meet(store: RendezvousStore, rank: int, size: int, timeout: datetime.timedelta) -> None:
    """Wait for all members, as long as the program lets a collective take: a peer's program may be late.

    Each writes a key of its own: it can do so twice, if it does not know whether a proxyd that died did it.
    """
    store.set(f"member/{rank}", b"1")
    store.wait([f"member/{member}" for member in range(size)], timeout)
