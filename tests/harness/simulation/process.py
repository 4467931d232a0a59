"""A simulated process, which ends when it is killed and whenever its owner says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from understudy.protos import control_pb2 as pb


class Process:
    """Stands in for `understudy.recovery.machine.processes.Watched`."""

    def __init__(self, pid: int, kill: Callable[[], None] = lambda: None) -> None:
        self.pid, self._kill = pid, kill
        self.running = True
        self.followers: list[Callable[[], None]] = []
        self.ended = self.memory_gone = asyncio.Event()
        self.ended_ns = 0

    def message(self) -> pb.Process:
        """As it travels."""
        return pb.Process(pid=self.pid)

    def die(self) -> None:
        """As by SIGKILL."""
        self._kill()

    async def end(self, grace: float) -> None:
        """Kill it, and wait until it has gone."""
        self._kill()
        await self.ended.wait()
