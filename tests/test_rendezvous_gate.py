"""A device server that is parked waits for no peers, whatever order its requests arrive in."""

from __future__ import annotations

from concurrent import futures

import pytest

from proxy_server.rendezvous_store import RendezvousCancelled, RendezvousGate


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
