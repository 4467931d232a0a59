"""What stands in for the pool of device servers: spares that start, die, or cannot be had for a while."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, cast

from simulation.device import Device
from simulation.programs import mix
from understudy.recovery.agent_api.server import Server
from understudy.recovery.host.spawner import SpawnerError

if TYPE_CHECKING:
    from simulation.world import World


class Pool:
    """As much of `understudy.recovery.host.servers.ServerPool` as a coordinator uses."""

    def __init__(self, world: World, spares: int) -> None:
        self._world = world
        self._spares = spares
        self._chance = random.Random(mix(world.seed, 13))
        self._starting = 0
        self._waiting: list[asyncio.Future[None]] = []
        self.ready: list[Device] = []
        self.outage_until = 0.0
        """Virtual time at which servers can be started again."""
        self.broken = ""
        self.leased: set[str] = set()

    def make(self) -> Device:
        """A server that is ready."""
        device = self._world.new_device()
        device.followers.append(lambda: self._idle_died(device))
        return device

    def fill(self) -> None:
        """Start what is missing."""
        while len(self.ready) + self._starting < self._spares + len(self._waiting):
            self._starting += 1
            begin = max(0.0, self.outage_until - self._world.loop.time())
            self._world.later(begin + self._chance.uniform(0.005, 0.06), self._started)

    def _started(self) -> None:
        if self.outage_until > self._world.loop.time():
            self._starting -= 1
            return self.fill()
        self._starting -= 1
        self.ready.append(self.make())
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    def _idle_died(self, device: Device) -> None:
        if device in self.ready:
            self.ready.remove(device)
            self.fill()

    async def take(self, device: str, timeout: float = 60.0) -> Server:
        """A ready one; raises SpawnerError if there is none in time."""
        until = self._world.loop.time() + timeout
        while True:
            while self.ready:
                server = self.ready.pop(0)
                if server.process.running:
                    server.device = device
                    return cast(Server, server)
            waiting: asyncio.Future[None] = self._world.loop.create_future()
            self._waiting.append(waiting)
            self.fill()
            try:
                await asyncio.wait_for(waiting, max(0.0, until - self._world.loop.time()))
            except TimeoutError:
                raise SpawnerError(f"no device server became ready within {timeout:.0f} s") from None
            finally:
                self._waiting.remove(waiting)

    def a_spare(self, device: str) -> Server | None:
        """One that is ready."""
        return cast(Server, self.ready[0]) if self.ready else None

    def lease(self, device: str) -> None:
        """Nobody could get it."""
        self.leased.add(device)

    def unlease(self, device: str, fill: bool = True) -> None:
        """Somebody could get it."""
        self.leased.discard(device)

    def retire(self, server: Device) -> None:
        """End it without waiting."""
        server.retired = True
        self._world.later(self._chance.uniform(0.0001, 0.002), server.kill)
