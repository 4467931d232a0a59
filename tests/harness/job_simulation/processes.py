"""Processes of a simulated host as one of its proxyds sees them; they outlive it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from google.protobuf.message import Message
from simulation.device import Device
from simulation.process import Process

from understudy.protos import control_pb2 as pb
from understudy.recovery.agent_api.commands import NotDone
from understudy.recovery.agent_api.server import Server
from understudy.recovery.machine.processes import Watched

STARTED = 7
"""Start ticks of all of them: no pid comes twice."""
ANSWERS_WITHIN_S, LOOK_S = 20.0, 0.005


class Seen(Watched):
    """As Watched, without a kernel."""

    def __init__(self, process: Process, followers: list[Callable[[], None]]) -> None:
        self.pid, self.start_ticks = process.pid, STARTED
        self._process, self._fd = process, -1
        self.ended = self.memory_gone = asyncio.Event()
        self.ended_ns = 0
        if process.running:
            followers.append(lambda: self.has_stopped(process.ended_ns))
        else:
            self.has_stopped(1)

    @property
    def running(self) -> bool:
        """Asked of the process itself."""
        return self._process.running and not self.ended.is_set()

    def message(self) -> pb.Process:
        """As it travels."""
        return pb.Process(pid=self.pid, start_ticks=STARTED)

    def send(self, number: signal.Signals) -> None:
        """It ends by those that are sent here."""
        self._process.die()

    def close(self) -> None:
        """There is nothing to let go of."""

    def maps(self, directory: Path) -> bool:
        """No program replaces itself here."""
        return True

    async def end(self, grace: float) -> None:
        """Kill it, and wait until it has gone."""
        self._process.die()
        await self.ended.wait()


class KnownServer(Server):
    """A device server as LocalServer."""

    def __init__(self, device: Device, name: str) -> None:
        super().__init__(Seen(device.process, device.followers), device.socket, name,
                         data_address=str(device.socket))  # fmt: skip
        self.behind = device

    async def execute(self, command: Message, within_s: float | None = None) -> Any:
        """As LocalServer."""
        return await self.behind.execute(command, within_s)

    async def execute_once_ready(self, command: Message) -> pb.AdoptReply:
        """A successor of proxyd asks how things stand."""
        device, loop = self.behind, asyncio.get_running_loop()
        patience = loop.time() + ANSWERS_WITHIN_S
        await asyncio.sleep(device.chance.uniform(0.0002, 0.002))
        device.stub.break_off_rebuild()
        while device.process.running and (device.stub.waits or device.stall.stopped):
            if loop.time() > patience:
                raise NotDone("Deadline Exceeded", late=True)
            await asyncio.sleep(LOOK_S)
        if not device.process.running:
            raise NotDone("Socket closed")
        return account_of(device)

    async def close(self) -> None:
        """There is nothing to let go of."""


def account_of(device: Device) -> pb.AdoptReply:
    """As `_account` of proxy_server/device_server.py."""
    if device.log is None:
        return pb.AdoptReply(newest_generation=device.newest_generation)
    told = device.account
    return pb.AdoptReply(
        job=device.world.job.name, rank=device.rank, parked=told.parked,
        holds_state=told.holds_state and not device.roll.active,
        attached_generation=told.attached_generation, generation=device.generation,
        newest_generation=device.newest_generation, restored_commit=told.restored_commit,
        fault=told.fault,
    )  # fmt: skip
