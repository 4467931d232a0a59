"""Device servers: started ahead of need, watched by pidfd, handed out, taken back or ended."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import structlog

from understudy.protos import control_pb2 as pb
from understudy.recovery.agent_api.commands import NotDone, command_of
from understudy.recovery.agent_api.server import Server, is_gpu
from understudy.recovery.base.background import BackgroundTasks
from understudy.recovery.host.local_server import LocalServer
from understudy.recovery.host.spawner import Installation, Spawner, SpawnerError
from understudy.recovery.machine.processes import Watched

log = structlog.get_logger()

CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP)
"""Of which a process dies by what itself, or a driver in it, does.  SIGKILL is somebody else's, or the
kernel's where memory is short."""
ENDED_S = 10.0
"""How long the end of a server is waited for that does not answer any more, seconds."""
READY_WITHIN = command_of(pb.HealthRequest()).within_s
"""Seconds a server may take from fork to its first answer."""
SETTLE_S = 3.0
"""For servers that are being forked while all are ended: it takes milliseconds."""
_MOST_FAILED_STARTS = 3


class ServerPool:
    """Keeps `spares` warm servers beside one for every device that no session holds.

    On the cpu driver any server fits any device; a CUDA server is bound to its device when it is forked.
    """

    def __init__(
        self, devices: list[str], spares: int, runtime: Path, command: list[str], gpus: Sequence[str] = ()
    ) -> None:
        """`gpus`: UUIDs of the devices, as a proxyd before us knew them: numbers may change with a loss."""
        self._spares = spares
        self._runtime = runtime
        self._command = command
        self._spawner = Spawner(command)
        self._devices = tuple(devices)
        self._leased: set[str] = set()
        self._ready: dict[str, list[Server]] = {_affinity(device): [] for device in devices}
        self._starting: Counter[str] = Counter()
        self._awaited: Counter[str] = Counter()
        self.gpus = tuple(gpus)
        """UUIDs, by the devices' indices."""
        self._failed_starts = 0
        self._changed = asyncio.Condition()
        self._servers: set[Server] = set()
        self._background = BackgroundTasks("server pool")
        self._names = secrets.token_hex(4)
        self._stopping = False
        self._number = 0
        self.broken = ""
        """A sentence, once servers cannot be started any more."""

    async def start(self) -> Installation:
        """Start the spawner and begin to fill the pool; raises SpawnerError."""
        installation = await self._spawner.start()
        self.gpus = self.gpus or installation.gpu_uuids[: len(self._devices)]
        self._background.start(self._follow_spawner())
        self.fill()
        return installation

    def ready(self) -> int:
        """Servers that could take over at once."""
        return sum(len(servers) for servers in self._ready.values())

    def spares(self) -> int:
        """Ready servers beyond one for every free device."""
        return max(0, self.ready() - len(self._devices) + len(self._leased))

    def a_spare(self, device: str) -> Server | None:
        """A ready server that would fit `device`, if there is one."""
        return next(iter(self._ready[_affinity(device)]), None)

    async def take(self, device: str, timeout: float = READY_WITHIN) -> Server:
        """A ready server for `device`; raises SpawnerError if there is none in time.

        Call `fill` some time later: starting its replacement competes with what the taken one is needed for.
        """
        affinity = _affinity(device)
        self._awaited[affinity] += 1
        try:
            if len(self._ready[affinity]) < self._awaited[affinity]:
                self.fill()  # two ranks that wait for one spare need two servers
            async with self._changed:
                return await self._take(device, timeout)
        finally:
            self._awaited[affinity] -= 1

    async def _take(self, device: str, timeout: float) -> Server:
        """With `_changed` held."""
        affinity = _affinity(device)
        while True:
            try:
                await asyncio.wait_for(
                    self._changed.wait_for(lambda: bool(self._ready[affinity]) or bool(self.broken)), timeout
                )
            except TimeoutError:
                raise SpawnerError(f"no device server became ready within {timeout:.0f} s") from None
            while self._ready[affinity]:
                server = self._ready[affinity].pop(0)
                if server.process.running:
                    server.device = device
                    return server
                self._background.start(self.end(server))
            if self.broken:
                raise SpawnerError(self.broken)
            self.fill()

    @property
    def servers(self) -> frozenset[Server]:
        """All that run, ready or not."""
        return frozenset(self._servers)

    def adopt(self, server: Server) -> None:
        """One that a predecessor started: it is ended with the others."""
        self._servers.add(server)

    def lease(self, device: str) -> None:
        """Nobody could get `device`: the pool need not keep a server for it."""
        self._leased.add(device)

    def unlease(self, device: str, fill: bool = True) -> None:
        """`device` is free."""
        self._leased.discard(device)
        if fill:
            self.fill()

    def retire(self, server: Server) -> None:
        """End it (SIGKILL) and let go of it, without waiting."""
        server.retired = True
        self._background.start(self.end(server))

    async def end(self, server: Server, grace: float = 0.0) -> None:
        """End a server (SIGKILL unless it is given `grace` seconds)."""
        server.retired = True
        await server.process.end(grace)
        self._servers.discard(server)
        await server.close()

    async def stop(self) -> None:
        """End every server and the spawner; all are gone when this returns."""
        self._stopping = True
        await self._spawner.settle(SETTLE_S)
        await self._background.cancel()
        await asyncio.gather(*(server.process.end(3.0) for server in self._servers))
        await self._spawner.stop()
        await asyncio.gather(*(server.close() for server in self._servers))
        self._servers.clear()

    async def crash_of(self, server: Server) -> str:
        """The signal of CRASHES by which a server has ended; empty: it has not, or otherwise."""
        try:
            await asyncio.wait_for(server.process.memory_gone.wait(), ENDED_S)
            status = await asyncio.shield(asyncio.ensure_future(self._spawner.status_of(server.pid)))
        except (TimeoutError, SpawnerError):
            return ""
        return signal.Signals(-status).name if status is not None and -status in CRASHES else ""

    def _wanted(self, affinity: str) -> int:
        free = sum(_affinity(one) == affinity and one not in self._leased for one in self._devices)
        return free + self._spares + self._awaited[affinity]

    def fill(self) -> None:
        """Start what is missing."""
        if self._stopping or self.broken:
            return
        for affinity, ready in self._ready.items():
            for _ in range(self._wanted(affinity) - len(ready) - self._starting[affinity]):
                self._starting[affinity] += 1
                self._background.start(self._start_one(affinity))

    async def _start_one(self, affinity: str) -> None:
        self._number += 1
        socket = self._runtime / f"server-{self._names}-{self._number}.sock"  # unlike those of a predecessor
        server: LocalServer | None = None
        try:
            pid = await self._spawner.spawn(socket, affinity, self._gpu(affinity))
            server = LocalServer(Watched(pid), socket, affinity)
            self._servers.add(server)
            await _answering(server)
        except (SpawnerError, ProcessLookupError, NotDone, TimeoutError) as problem:
            if server is not None:
                self._servers.discard(server)
                await server.process.end(0.0)
                await server.close()
            await self._start_failed(affinity, problem)
            return
        async with self._changed:
            self._starting[affinity] -= 1
            self._failed_starts = 0
            self._ready[affinity].append(server)
            self._changed.notify_all()
        log.debug("server ready", pid=server.pid, device=affinity)
        self._background.start(self._follow_idle(server))

    def _gpu(self, affinity: str) -> str:
        return self.gpus[int(affinity.partition(":")[2]) % len(self.gpus)] if self.gpus else ""

    async def _start_failed(self, affinity: str, problem: Exception) -> None:
        text = str(problem) or type(problem).__name__
        log.error("a device server did not start", device=affinity, problem=text)
        async with self._changed:
            self._starting[affinity] -= 1
            self._failed_starts += 1
            if self._failed_starts >= _MOST_FAILED_STARTS:
                self.broken = f"device servers do not start: {text}"
                self._changed.notify_all()
        self.fill()

    async def _follow_idle(self, server: Server) -> None:
        """Replace a server that dies while nobody uses it."""
        await server.process.ended.wait()
        ready = self._ready[_affinity(server.device)]
        if server in ready:
            log.warning("an idle device server died", pid=server.pid)
            ready.remove(server)
            self._servers.discard(server)
            await server.close()
            self.fill()

    async def _follow_spawner(self) -> None:
        while True:
            status = await self._spawner.wait()
            log.error("the spawner ended; another one is started", status=status)
            self._spawner = Spawner(self._command)
            try:
                await self._spawner.start()
            except SpawnerError as problem:
                async with self._changed:
                    self.broken = str(problem)
                    self._changed.notify_all()
                return
            self.fill()


async def _answering(server: LocalServer) -> None:
    """Until its Health answers; raises if it ends before."""
    asked = asyncio.ensure_future(_ask(server))
    ended = asyncio.ensure_future(server.process.ended.wait())
    try:
        await asyncio.wait({asked, ended}, timeout=READY_WITHIN, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            raise SpawnerError("it ended while it started" if ended.done() else "it did not answer in time")
        asked.result()
    finally:
        asked.cancel()
        ended.cancel()


async def _ask(server: LocalServer) -> None:
    reply = await server.execute_once_ready(pb.HealthRequest())
    server.data_address = reply.data_address


def _affinity(device: str) -> str:
    """What a server is bound to: nothing in particular on the cpu driver."""
    return device if is_gpu(device) else "cpu:0"
