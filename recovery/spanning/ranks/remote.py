"""Processes of another host as its proxyd tells of them, and device servers steered through it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from understudy.protos.device_server_pb2 import DESCRIPTOR
from understudy.recovery.base.control import pb
from understudy.recovery.machine.processes import Watched
from understudy.recovery.state.server import Server

Send = Callable[["RemoteProcess", signal.Signals], None]
Steer = Callable[["RemoteServer", str, Any, float], Awaitable[Any]]
_METHODS = DESCRIPTOR.services_by_name["DeviceServer"].methods_by_name


class SteerFailed(grpc.RpcError):  # type: ignore[misc]
    """A device server of another host did not do as it was told."""

    def __init__(self, details: str, *, ran_out: bool = False, homeless: bool = False) -> None:
        """`homeless`: for want of a device there."""
        super().__init__(details)
        self._details, self.homeless = details, homeless
        self._code = grpc.StatusCode.DEADLINE_EXCEEDED if ran_out else grpc.StatusCode.UNAVAILABLE

    def code(self) -> grpc.StatusCode:
        """As gRPC has it."""
        return self._code

    def details(self) -> str:
        """A sentence."""
        return self._details


class NotMoved(SteerFailed):
    """A rank is surely where it was."""


class RemoteProcess(Watched):
    """A worker or a device server of another host; its end is told."""

    def __init__(self, process: pb.Process, send: Send) -> None:
        self.pid, self.start_ticks = process.pid, process.start_ticks
        self.ended = self.memory_gone = asyncio.Event()  # its own host sees to what is left of it
        self.ended_ns = 0
        self._send = send

    @property
    def running(self) -> bool:
        """As far as we know."""
        return not self.ended.is_set()

    def has_ended(self, at_ns: int = 0) -> None:
        """We have been told; CLOCK_MONOTONIC of this host."""
        if not self.ended.is_set():
            self.ended_ns = at_ns or time.monotonic_ns()
            self.ended.set()

    def send(self, number: signal.Signals) -> None:
        """Have it signalled."""
        if self.running:
            self._send(self, number)

    def close(self) -> None:
        """There is nothing to let go of."""

    async def end(self, grace: float) -> None:
        """Have it killed; until it has ended, or its host is given up."""
        self.send(signal.SIGKILL)
        await self.ended.wait()


class SteerStub:
    """As rpc.DeviceServerStub."""

    def __init__(self, server: RemoteServer, steer: Steer) -> None:
        self._server = server
        self._steer = steer

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method not in _METHODS:
            raise AttributeError(method)

        def call(request: Any, timeout: float) -> Awaitable[Any]:
            return self._steer(self._server, method, request, timeout)

        return call


class RemoteServer(Server):
    """A device server of another host."""

    def __init__(
        self, host: str, process: RemoteProcess, device: str, socket: str, data_address: str, steer: Steer
    ) -> None:
        self.process = process
        self.socket = Path(socket)
        """There."""
        self.device = device
        self.host = host
        self.data_address = data_address
        self.stub = SteerStub(self, steer)
        self.retired = False
        self.verdict = None
        self.generation = 0
        self.failed_at = -1
        self.suspect = False
        self.quiet_since_ns = 0
        self.moved_ns = 0
        self.stuck_ns = 0

    async def close(self) -> None:
        """Its own proxyd does that."""


def absent_server(device: str) -> RemoteServer:
    """In place of the one that a rank does not have yet."""

    async def steer(server: RemoteServer, method: str, request: Any, timeout: float) -> Any:
        raise SteerFailed("this rank has no device server yet")

    process = RemoteProcess(pb.Process(), lambda *_: None)
    process.has_ended()
    server = RemoteServer("", process, device, "", "", steer)
    server.retired = True
    return server


def message_class(method: str, *, reply: bool) -> Any:
    """The message of a method of DeviceServer; raises KeyError."""
    described = _METHODS[method]
    return GetMessageClass(described.output_type if reply else described.input_type)
