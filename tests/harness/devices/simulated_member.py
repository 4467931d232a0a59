"""A rank of two whose executor works on a simulated CUDA device; the other rank is a thread on the host, so
that it comes when a test says so.

With SIMULATED_CUDA_LIBRARY in the environment, which names it; to be imported before PyTorch is.
"""

import datetime
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import simulated_device

simulated_device.load()

import torch  # noqa: E402 - it looks for devices when it is imported
import torch.distributed as dist  # noqa: E402

sys.path.append(str(Path(os.environ["SIMULATED_CUDA_LIBRARY"]).parent))
import simulated_nccl  # type: ignore[import-not-found]  # noqa: E402
from executor_harness import COLLECTIVE, COMMUNICATOR_CREATE, PHASE, Harness  # noqa: E402

from understudy.proxy_server import _server  # noqa: E402

LONG_S = 60.0
COMMUNICATOR = 7
OTHER_GPU = "cuda:1"
"""The other rank's: who waits for all that ours has to do must not wait for that, too."""
OWN = sys.argv[2:] == ["own"]
"""Whether collectives are our own calls of NCCL, those of the other rank, too."""
OURS, THEIRS, SUM = (1.0, 2.0, 3.0, 4.0), (5.0, 6.0, 7.0, 8.0), (11.0, 12.0, 13.0, 14.0)
"""What this rank has, and what both have together: the other one brings 10 of each."""


class Member(Harness):
    """Rank 0 of two, with a commit behind which it has a buffer, 1."""

    def __init__(self, *, optimizer_preimages: bool = True, snapshot_bytes: int = 0) -> None:
        self.store = dist.HashStore()
        self.peer: dist.ProcessGroup | OwnPeer | None = None
        self.joining: threading.Thread | None = None
        super().__init__(optimizer_preimages=optimizer_preimages, snapshot_bytes=snapshot_bytes)
        self.new(1, list(OURS))
        self.writer.append(COMMUNICATOR_CREATE, COMMUNICATOR, [1, 2, 0, 2, 60_000])
        self.commit()
        self.writer.append(PHASE, 0, [])
        self.synchronize()

    def new_executor(self) -> _server.Executor:
        executor = _server.Executor(self.connect)
        executor.attach(self.directory, device="cuda:0", threads=1, generation=0, **self.options)
        return executor

    def connect(self, uid: str, generation: int, rank: int, size: int, timeout_ms: int) -> dist.ProcessGroup:
        store = dist.PrefixStore(f"{generation}/{uid}", self.store)

        def join() -> None:
            self.peer = OwnPeer(store) if OWN else gloo(store, 1)
            self.peer.allreduce([torch.zeros(1)]).wait()  # by which all members connect

        joining = threading.Thread(target=join, daemon=True)
        joining.start()
        self.joining = joining
        if OWN:
            return _server.own_collectives(store, rank, size, timeout_ms)
        return simulated_nccl.around(rank, size, lambda: gloo(store, rank))

    def all_reduce(self) -> None:
        header = [1, 0, 0, 0, 1, 0, 1, 0]  # kind, reduction, peer, tag, sequence, inputs, outputs, splits
        self.writer.append(COLLECTIVE, COMMUNICATOR, [*header, 1 | 6 << 8 | 1 << 16, 1, 0, 4, 1])

    def other(self) -> "dist.ProcessGroup | OwnPeer":
        """The other rank, connected."""
        self.wait(lambda: self.joining is not None, "did not connect")
        assert self.joining is not None
        self.joining.join()
        assert self.peer is not None
        return self.peer

    def other_comes(self) -> torch.Tensor:
        """The other rank does its part; answers what it got."""
        theirs = torch.full((4,), 10.0)
        self.other().allreduce([theirs]).wait()
        return theirs

    def await_wait(self) -> None:
        """Until the executor says that it waits for the all-reduce."""
        self.wait(lambda: self.log.in_collective == 1 and self.log.wait_sequence == 1, "does not wait")

    def go_on(self) -> None:
        """Behind a rewind, with new connections."""
        self.joining = None  # at the commit nothing had been connected yet
        self.executor.rebuild(1)
        self.executor.resume()


class OwnPeer:
    """The other rank by our own calls of NCCL, on a stream of its own; a call returns when it has ended."""

    def __init__(self, store: dist.Store) -> None:
        torch.cuda._lazy_init = lambda: None  # type: ignore[assignment]  # asks for a CUDA build
        self.group = _server.own_collectives(store, 1, 2, int(1000 * LONG_S))
        self.stream = torch.Stream(device=OTHER_GPU)

    def allreduce(self, tensors: list[torch.Tensor]) -> "OwnPeer":
        with self.stream:
            there = tensors[0].to(OTHER_GPU)
            self.group.allreduce([there]).wait()
            tensors[0].copy_(there)
        return self

    def exchange(self, sent: torch.Tensor) -> torch.Tensor:
        """Of one message each, in a group."""
        with self.stream:
            there, got = sent.to(OTHER_GPU), torch.empty(sent.shape, device=OTHER_GPU)
            self.group._start_coalescing()
            self.group.send([there], 0, 0)
            self.group.recv([got], 0, 0)
            self.group._end_coalescing().wait()
            return got.cpu()

    def wait(self) -> None:
        """It has ended."""


def gloo(store: dist.Store, rank: int) -> dist.ProcessGroup:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = datetime.timedelta(seconds=LONG_S)
    return dist.ProcessGroupGloo(store, rank, 2, options)


def in_background(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    return thread, found
