"""How long ranks take to meet at proxyd's store, as a rebuild of their communicator begins; no PyTorch.

    .venv/bin/python bench/rendezvous_cost.py [--ranks 64] [--times 5] [--value 186]

Each rank is a process with a connection of its own, as a device server is. It says twice something of its own
and asks twice for all that the others say, as proxy_server/backends.py and Gloo do it. The clock runs from a
common start until the last one has everything; the store's process is proxyd's part of it.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import threading
import time
from multiprocessing.synchronize import Barrier, Event
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
WAIT_MS = 60_000


def serve(path: str, ready: Event, ended: Event, spent: Any) -> None:
    """The store, until `ended`; `spent`: seconds of a processor that it has taken so far."""
    import grpc.aio

    from understudy.recovery.base.control import rpc
    from understudy.recovery.rendezvous.services import RendezvousService
    from understudy.recovery.rendezvous.store import Store

    async def main() -> None:
        server = grpc.aio.server()
        rpc.add_RendezvousServicer_to_server(RendezvousService(Store()), server)
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        ready.set()
        while not ended.is_set():
            spent.value = time.process_time()
            await asyncio.sleep(0.01)
        await server.stop(None)

    asyncio.run(main())


def meet(path: str, rank: int, ranks: int, times: int, value: int, gate: Barrier, done: Barrier) -> None:
    """As a device server that connects one communicator, in so many generations."""
    import grpc

    from understudy.recovery.base.control import pb, rpc

    with grpc.insecure_channel(f"unix:{path}") as channel:
        stub = rpc.RendezvousStub(channel)
        grpc.channel_ready_future(channel).result()
        for generation in range(times):
            gate.wait()
            for what, text in ((f"meet/{generation}", b"1 1"), (str(generation), bytes(value))):
                keys = [f"job/{what}/{other}" for other in range(ranks)]
                stub.Set(pb.StoreSetRequest(key=keys[rank], value=text))
                reply = stub.Get(pb.StoreGetRequest(keys=keys, timeout_ms=WAIT_MS))
                assert len(reply.values) == ranks
            done.wait()


def measure(ranks: int, times: int, value: int) -> tuple[list[float], float]:
    """Seconds of each meeting, and the store's processor seconds of one."""
    with tempfile.TemporaryDirectory(prefix="understudy-bench-") as folder:
        path = f"{folder}/store"
        ready, ended = CONTEXT.Event(), CONTEXT.Event()
        spent = CONTEXT.Value("d", 0.0)
        store = CONTEXT.Process(target=serve, args=(path, ready, ended, spent))
        store.start()
        ready.wait()
        gate, done = CONTEXT.Barrier(ranks + 1), CONTEXT.Barrier(ranks + 1)
        of_all = (ranks, times, value, gate, done)
        processes = [CONTEXT.Process(target=meet, args=(path, rank, *of_all)) for rank in range(ranks)]
        for process in processes:
            process.start()
        took: list[float] = []
        before = 0.0
        for number in range(times):
            while gate.n_waiting < ranks:
                time.sleep(0.01)
            if number == 0:
                threading.Event().wait(0.1)  # until the store has told what the connections cost
                before = spent.value
            begin = time.perf_counter()
            gate.wait()
            done.wait()
            took.append(time.perf_counter() - begin)
        for process in processes:
            process.join()
        threading.Event().wait(0.1)
        used = (spent.value - before) / times
        ended.set()
        store.join()
    return took, used


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--times", type=int, default=5, help="meetings (5)")
    parser.add_argument("--value", type=int, default=186, help="bytes of an address; Gloo's have 186")
    options = parser.parse_args()
    took, used = measure(options.ranks, options.times, options.value)
    print(
        f"{options.ranks} ranks met in {statistics.median(took):.3f} s (median of {len(took)}; "
        f"{min(took):.3f} to {max(took):.3f}), of which the store was at work for {used:.3f} s"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
