"""However many ranks a communicator has, each of them asks proxyd's store twice to connect it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import torch
import torch.distributed as dist

from understudy.proxy_server.backends import ENVIRONMENT, BackendFactory
from understudy.proxy_server.rendezvous_store import RendezvousGate, RendezvousStore
from understudy.recovery.base.control import pb, rpc
from understudy.recovery.rendezvous.services import RendezvousService
from understudy.recovery.rendezvous.store import Store

RANKS = 12


class Counting(RendezvousService):
    """The store's service, which counts what it is asked."""

    def __init__(self) -> None:
        super().__init__(Store())
        self.asked: Counter[str] = Counter()

    async def _ask(self, key: str, there: Any, request: Any, here: Any, context: Any) -> Any:
        self.asked[type(request).__name__] += 1
        return await super()._ask(key, there, request, here, context)

    async def Get(self, request: Any, context: Any) -> Any:
        self.asked["StoreGetRequest"] += 1
        return await super().Get(request, context)


@pytest.fixture
def served(folder: Path) -> Iterator[tuple[Counting, grpc.Channel]]:
    """A store in a thread of its own, and a channel to it."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    made: list[Counting] = []
    ended = asyncio.Event()

    async def serve() -> None:
        server = grpc.aio.server()
        made.append(Counting())
        rpc.add_RendezvousServicer_to_server(made[0], server)
        server.add_insecure_port(f"unix:{folder}/store")
        await server.start()
        ready.set()
        await ended.wait()
        await server.stop(None)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait()
    with grpc.insecure_channel(f"unix:{folder}/store") as channel:
        yield made[0], channel
    loop.call_soon_threadsafe(ended.set)
    thread.join()
    loop.close()


def test_ranks_connect_with_two_requests_each(
    served: tuple[Counting, grpc.Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    service, channel = served
    kept: list[object] = []

    def connect(rank: int) -> float:
        factory = BackendFactory(channel, "cpu", RendezvousGate(), socket.gethostbyname("localhost"))
        factory.job, factory.rank = "job", rank
        kept.append(factory)
        backend = factory("uid", 3, rank, RANKS, 20_000)
        kept.append(backend)
        value = torch.full((1,), float(rank))
        backend.allreduce([value]).wait()
        return float(value)

    with ThreadPoolExecutor(RANKS) as pool:
        assert list(pool.map(connect, range(RANKS))) == [sum(range(RANKS))] * RANKS
    assert service.asked == {"StoreGetRequest": 2 * RANKS}


@pytest.mark.parametrize("then", ("wait", "check", "add", "delete_key", "set"))
def test_what_a_member_tells_is_told_before_whatever_it_does_next(
    then: str, served: tuple[Counting, grpc.Channel]
) -> None:
    service, channel = served
    store = RendezvousStore(channel, RendezvousGate(), "job/1/uid", 20_000, exchanges=True)
    reader = RendezvousStore(channel, RendezvousGate(), "job/1/uid", 1)
    store.set("mine", "7")
    assert not reader.check(["mine"]) and "StoreSetRequest" not in service.asked
    match then:
        case "wait":
            store.wait(["mine"])
        case "check":
            assert store.check(["mine"])
        case "add":
            assert store.add("mine", 1) == 8
        case "delete_key":
            assert store.delete_key("mine")
        case "set":
            store.set("next", "8")
    assert reader.check(["mine"]) == (then != "delete_key")


def test_nothing_is_set_in_the_store_of_another_job_than_is_asked(
    served: tuple[Counting, grpc.Channel],
) -> None:
    request = pb.StoreGetRequest(keys=["job/a"], set=pb.StoreSetRequest(key="other/a", value=b"1"))
    with pytest.raises(grpc.RpcError, match="is of one job"):
        rpc.RendezvousStub(served[1]).Get(request)
    assert not rpc.RendezvousStub(served[1]).Check(pb.StoreCheckRequest(keys=["other/a"])).found


def test_many_keys_are_asked_for_in_pieces_and_waited_for_together(
    served: tuple[Counting, grpc.Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("understudy.proxy_server.rendezvous_store.MOST_KEYS_AT_ONCE", 4)
    service, channel = served
    store: dist.Store = RendezvousStore(channel, RendezvousGate(), "job/1/uid", 20_000)
    keys = [str(number) for number in range(10)]
    for key in keys:
        store.set(key, f"of {key}")
    service.asked.clear()
    assert store.multi_get(keys) == [f"of {key}".encode() for key in keys]
    store.wait(keys[:4])
    assert service.asked == {"StoreGetRequest": 4}
    late = RendezvousStore(channel, RendezvousGate(), "job/1/uid", 1)
    with pytest.raises(RuntimeError, match="no peer published all of 8 to absent within 1 ms"):
        late.multi_get(["8", "absent"])
