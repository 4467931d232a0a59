"""Processes of another host as its proxyd tells of them, and device servers that are told through it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from understudy.protos import control_pb2 as pb
from understudy.recovery.agent_api.commands import NotDone
from understudy.recovery.agent_api.server import Server
from understudy.recovery.machine.processes import Watched

Send = Callable[[pb.Process, signal.Signals], None]
Execute = Callable[["RemoteServer", Message, "float | None"], Awaitable[Any]]


class NoDeviceThere(NotDone):
    """Another host has none for a rank."""


class NotMoved(NotDone):
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

    def hear_of_end(self, at_ns: int = 0) -> None:
        """Nobody else tells us; CLOCK_MONOTONIC of this host."""
        self.has_stopped(at_ns or time.monotonic_ns())

    def send(self, number: signal.Signals) -> None:
        """Have it signalled."""
        if self.running:
            self._send(self.message(), number)

    def close(self) -> None:
        """There is nothing to let go of."""

    async def end(self, grace: float) -> None:
        """Have it killed; until it has ended, or its host is given up."""
        self.send(signal.SIGKILL)
        await self.ended.wait()


class RemoteServer(Server):
    """A device server of another host."""

    def __init__(
        self, host: str, process: RemoteProcess, device: str, socket: str, data_address: str, execute: Execute
    ) -> None:
        super().__init__(process, Path(socket), device, host=host, data_address=data_address)
        self._execute = execute

    async def execute(self, command: Message, within_s: float | None = None) -> Any:
        """As Server."""
        return await self._execute(self, command, within_s)

    async def close(self) -> None:
        """Its own proxyd does that."""
