"""Which requests of a device server are sent again to the proxyd that follows one that died."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from understudy.protos import control_pb2 as pb
from understudy.protos import services as rpc
from understudy.proxy_server.daemon_channel import daemon_channel


class Dying(rpc.RendezvousServicer):  # type: ignore[misc]
    """Does what it is asked, and the first time dies before it answers."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.ids: list[str] = []

    def _answer(self, what: str, context: grpc.ServicerContext) -> pb.StoreReply:
        self.asked.append(what)
        if self.asked.count(what) == 1:
            context.abort(grpc.StatusCode.UNAVAILABLE, "it died")
        return pb.StoreReply(found=True, count=1)

    def Set(self, request: Any, context: grpc.ServicerContext) -> pb.StoreReply:
        return self._answer("Set", context)

    def Add(self, request: Any, context: grpc.ServicerContext) -> pb.StoreReply:
        self.ids.append(request.id)
        return self._answer("Add", context)


@pytest.fixture
def dying(tmp_path: Path) -> Iterator[tuple[Dying, rpc.RendezvousStub]]:
    """One of them, and a way to ask it."""
    service = Dying()
    server = grpc.server(ThreadPoolExecutor(1))
    rpc.add_RendezvousServicer_to_server(service, server)
    server.add_insecure_port(f"unix:{tmp_path}/socket")
    server.start()
    with daemon_channel(tmp_path / "socket") as channel:
        yield service, rpc.RendezvousStub(channel)
    server.stop(None).wait()


def test_what_may_be_done_twice_is_sent_again(dying: tuple[Dying, rpc.RendezvousStub]) -> None:
    service, stub = dying
    assert stub.Set(pb.StoreSetRequest(key="k", value=b"v"), timeout=20).found
    assert service.asked == ["Set", "Set"]


def test_an_addition_is_sent_again_with_the_id_by_which_it_counts_once(
    dying: tuple[Dying, rpc.RendezvousStub],
) -> None:
    service, stub = dying
    assert stub.Add(pb.StoreAddRequest(key="k", amount=1, id="once"), timeout=20).count == 1
    assert service.asked == ["Add", "Add"] and service.ids == ["once", "once"]
