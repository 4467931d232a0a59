"""A device server that is parked waits for no peers, whatever order its requests arrive in."""

from __future__ import annotations

import contextlib
import datetime
import threading
from concurrent import futures
from functools import partial

import pytest
import torch.distributed as dist
from proxied import until

from understudy.proxy_server.backends import newest_generation
from understudy.proxy_server.rendezvous_store import RendezvousCancelled, RendezvousGate

LONG_S = 20.0


def answered(value: int) -> futures.Future[int]:
    future: futures.Future[int] = futures.Future()
    future.set_result(value)
    return future


def test_a_rebuild_of_an_older_generation_that_comes_after_the_park_waits_for_nobody() -> None:
    gate = RendezvousGate()
    gate.begin()
    gate.open(2)
    gate.cancel(3)
    with pytest.raises(RendezvousCancelled, match="parked for generation 3, newer than 2"):
        gate.open(2)
    with pytest.raises(RendezvousCancelled):
        gate.result(answered(1))


def test_the_generation_it_was_parked_for_meets_its_peers() -> None:
    gate = RendezvousGate()
    gate.cancel(3)
    gate.open(3)
    assert gate.result(answered(1)) == 1


def test_generations_of_another_session_count_anew() -> None:
    gate = RendezvousGate()
    gate.cancel(8)
    gate.begin()
    gate.open(0)
    assert gate.result(answered(1)) == 1


def test_members_that_recovered_without_each_other_agree_on_the_newest_generation() -> None:
    store = dist.HashStore()
    with futures.ThreadPoolExecutor(3) as pool:
        work = [pool.submit(newest_generation, store, one, 3, 5 - one, 7 + one) for one in range(3)]
        assert [one.result(LONG_S) for one in work] == [5, 5, 5]


def test_a_member_that_went_back_while_others_waited_is_heard_again() -> None:
    """Its first generation was read before it was withdrawn, and the last member came after that."""

    class GoesBack(dist.HashStore):
        reads = 0

        def multi_get(self, keys: list[str]) -> list[bytes]:
            values: list[bytes] = super().multi_get(keys)
            self.reads += 1
            if self.reads == 1:
                self.set("1", "4 1")
            return values

    store = GoesBack()
    store.set("1", "2 1")
    assert newest_generation(store, 0, 2, 3, 0) == 4


class OfOneWhoDies(dist.Store):
    """A peer publishes where it can be reached, and never looks where the others are."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self.dead = threading.Event()

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, bytes(value) if not isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        self.dead.wait()
        raise RuntimeError("dead")

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        self.dead.wait()
        raise RuntimeError("dead")


def connect(store: dist.Store, rank: int) -> dist.ProcessGroup:
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = datetime.timedelta(seconds=LONG_S)
    return gloo(store, rank, 2, options)


def test_a_server_that_waits_for_a_dead_peer_to_connect_can_be_parked_at_once() -> None:
    """Gloo waits for it until its time is out: a recovery took 20 s more if a server died in another one.

    Which of two connects to the other depends on their ports, so it is tried often.
    """
    for attempt in range(10):
        store, gate = dist.HashStore(), RendezvousGate()
        theirs, rank = OfOneWhoDies(store), attempt % 2
        with futures.ThreadPoolExecutor(2) as threads:
            try:
                peer = threads.submit(connect, theirs, 1 - rank)
                ours = threads.submit(gate.run, partial(connect, store, rank))
                until(lambda store=store: store.num_keys() >= 2, "both addresses")  # type: ignore[misc]
                gate.cancel(1)
                with contextlib.suppress(RendezvousCancelled):
                    ours.result(timeout=LONG_S / 2)
            finally:
                gate.cancel(1)
                theirs.dead.set()
        assert isinstance(peer.exception(), RuntimeError)


def test_what_fails_while_it_connects_is_told() -> None:
    def fails() -> None:
        raise ValueError("no route")

    with pytest.raises(ValueError, match="no route"):
        RendezvousGate().run(fails)
