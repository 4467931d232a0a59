"""On a busy machine whoever listens greets late: nobody is taken for absent because of that."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from understudy.recovery.base.control import blocking_channel, pb, rpc

LATE_S = 0.4


class Daemon(rpc.DaemonServicer):  # type: ignore[misc]
    def GetStatus(self, request: Any, context: Any) -> pb.Status:
        return pb.Status()


def pass_on(source: socket.socket, to: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            to.sendall(data)
        to.shutdown(socket.SHUT_WR)


@pytest.fixture
def late(tmp_path: Path) -> Iterator[Path]:
    """A socket behind which a daemon is heard LATE_S after whoever connects."""
    server = grpc.server(ThreadPoolExecutor(2))
    rpc.add_DaemonServicer_to_server(Daemon(), server)
    server.add_insecure_port(f"unix:{tmp_path}/daemon")
    server.start()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "late"))
    listener.listen()
    ends = threading.Event()
    threads: list[threading.Thread] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                if ends.wait(LATE_S):
                    return near.close()
                far = socket.socket(socket.AF_UNIX)
                far.connect(str(tmp_path / "daemon"))
                for pair in ((near, far), (far, near)):
                    threads.append(threading.Thread(target=pass_on, args=pair, daemon=True))
                    threads[-1].start()

    serving = threading.Thread(target=serve)
    serving.start()
    yield tmp_path / "late"
    ends.set()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    serving.join()
    server.stop(0).wait()
    for thread in threads:
        thread.join()


def test_whoever_greets_late_is_asked_all_the_same(late: Path) -> None:
    with blocking_channel(late) as made:
        reply = rpc.DaemonStub(made).GetStatus(pb.StatusRequest(), timeout=20)
    assert reply == pb.Status()
