"""Where a job's ranks get their devices and device servers from: this host, or several."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from understudy.protos import control_pb2 as pb
from understudy.recovery.agent_api.commands import NoPlace, NotDone, command_of
from understudy.recovery.agent_api.server import Server
from understudy.recovery.host.leases import Leases
from understudy.recovery.host.servers import ServerPool
from understudy.recovery.host.spawner import SpawnerError
from understudy.recovery.planning.gpu_verdict import Finding, Severity
from understudy.recovery.state.jobs import Session

log = structlog.get_logger()

EMPTIED_S = 10.0
"""How long the memory of a device is waited for whose server has died, seconds."""

MOST_CRASHES = 2
"""New servers in a row that a device may crash; the first may have crashed by itself."""

TRIED_S = command_of(pb.TryDeviceRequest()).within_s
"""How long a device may take to compute a little, its context included, seconds."""


class _Crashed(Exception):
    """A new server died as it tried its device, of the signal that this names."""


class HostPlacement:
    """This host."""

    def __init__(
        self, pool: ServerPool, leases: Leases, emptied_s: float = EMPTIED_S, tried_s: float = TRIED_S
    ) -> None:
        self._pool = pool
        self._leases = leases
        self._emptied_s, self._tried_s = emptied_s, tried_s

    async def ready(self, sessions: list[Session], suspicious: bool) -> None:
        """Until all of these can be steered; `suspicious`: of what is between them."""

    def awaited(self, sessions: Sequence[Session]) -> str:
        """What has to come before all of these can be steered, in a sentence; empty: nothing."""
        return ""

    def free_devices(self) -> int:
        """That a rank whose own has failed could get."""
        return len(self._leases.free())

    def is_homeless(self, session: Session) -> bool:
        """Whether it needs another device."""
        return self._leases.is_homeless(session)

    def fence(self, session: Session, reason: str) -> None:
        """Its device has failed."""
        self._leases.fence(session, reason)

    def retire(self, server: Server) -> None:
        """End it (SIGKILL) and let go of it, without waiting."""
        self._pool.retire(server)

    def fill(self) -> None:
        """Start spares that are missing."""
        self._pool.fill()

    async def replacement(self, session: Session, keep_source: bool) -> Server:
        """A ready server in place of the session's, whose process is ended if it is not yet.

        `keep_source`: it lives on until its state has been copied.  A GPU that does not compute any more,
        or of which NVML tells what forbids its use, is fenced, and the rank goes to another one; so it does
        where NVML tells that another one is better, and there is one.  Raises NoPlace.
        """
        if keep_source:
            session.server.retired = True
            session.source_server = session.server
        else:
            self._pool.retire(session.server)
            if not await _device_emptied(session, self._emptied_s):
                self.fence(
                    session, f"its last server still held its memory {self._emptied_s:.0f} s after its end"
                )
        while True:
            if self._leases.is_homeless(session) and not self._leases.move(session):
                raise NoPlace(f"{session.device} of rank {session.rank} is gone, and no other is free")
            wished = session.destination
            device = session.device if wished is None else self._leases.name(wished)
            if not session.on_gpu:
                return await self._server_on(session, device)
            tried = await self._tried(session, device)
            if not isinstance(tried, Finding):
                return tried
            if wished is not None:
                raise NoPlace(f"rank {session.rank} did not move to {device}: {tried.sentence}")
            if tried.severity is Severity.LEAVE:
                self._leases.leave(session, tried.sentence)
            else:
                self.fence(session, tried.sentence)

    async def _tried(self, session: Session, device: str) -> Server | Finding:
        """A ready server on a device that may be used, or what tells against it.  Raises NoPlace."""
        wished = session.destination
        index = session.device_index if wished is None else wished
        asked = asyncio.ensure_future(self._leases.health.finding(index, newcomer=wished is not None))
        server, problem = None, ""
        try:
            server, problem = await self._computing(session, device)
            found = await asked if server is not None else None
        except NoPlace:
            found = await asked
            if found is None or found.severity is not Severity.UNUSABLE:
                raise
            problem = found.sentence
        except asyncio.CancelledError:
            if server is not None:
                self._pool.retire(server)
            raise
        finally:
            asked.cancel()
        if server is None:
            return Finding(Severity.UNUSABLE, problem)
        if found is None:
            return server
        if found.severity is Severity.UNUSABLE or wished is not None or self._leases.has_better():
            self._pool.retire(server)
            if found.severity is Severity.UNUSABLE and wished is not None:
                self._leases.fence_free(wished, found.sentence)
            return found
        log.warning("a GPU is used on, as no better one is free", device=device, reason=found.sentence)
        return server

    async def _computing(self, session: Session, device: str) -> tuple[Server | None, str]:
        """A ready server that has got its device to compute, or why none has.  Raises NoPlace."""
        crashes: list[str] = []
        while len(crashes) < MOST_CRASHES:
            server = await self._server_on(session, device)
            try:
                problem = await self._trouble_of(server)
            except _Crashed as crash:
                crashes.append(str(crash))
                continue
            if not problem:
                return server, ""
            self._pool.retire(server)
            return None, problem
        signals = " and ".join(dict.fromkeys(crashes))
        return None, f"{len(crashes)} new device servers there died as they tried it, of {signals}"

    async def _server_on(self, session: Session, device: str) -> Server:
        try:
            return await self._pool.take(device)
        except SpawnerError as problem:
            raise NoPlace(f"rank {session.rank} got no new device server: {problem}") from problem

    async def _trouble_of(self, server: Server) -> str:
        """What keeps its device from computing; empty if it does.  Raises NoPlace, and _Crashed.

        Of a server that crashes there the driver need not be the cause (an abort for want of host memory
        looks the same), so another one is asked.  One that is killed, or ends with a status, tells nothing:
        whether the kernel's own end of a process for its memory, somebody's SIGKILL or a driver is behind it
        cannot be told apart, and the round is tried again.
        """
        try:
            reply = await server.execute(pb.TryDeviceRequest(), self._tried_s)
        except asyncio.CancelledError:
            self._pool.retire(server)
            raise
        except NotDone as problem:
            if not problem.late:
                try:
                    crash = await self._pool.crash_of(server)
                finally:
                    self._pool.retire(server)
                if crash:
                    raise _Crashed(crash) from problem
                raise NoPlace(f"a new device server on {server.device} ended: {problem}") from problem
            return f"a new device server there did not get it to compute within {self._tried_s:.0f} s"
        return f"a new device server there was told: {reply.error}" if reply.error else ""

    async def emptied(self, server: Server) -> None:
        """Until a server that is being ended has given back its GPU's memory: not for ever."""
        try:
            await asyncio.wait_for(server.process.memory_gone.wait(), self._emptied_s)
        except TimeoutError:
            log.warning(
                "a server that was left still holds its GPU's memory", device=server.device, pid=server.pid
            )

    def could_serve(self, source: Server, session: Session) -> bool:
        """Whether a rank's former server, which has its state, could go on with it."""
        return source.process.running and not source.suspect

    def arrive(self, session: Session) -> None:
        """The rank's new server holds its state."""
        self._leases.arrive(session)

    def read_from(self, holder: Server, reader: Session) -> str:
        """The address at which the server of `reader` reads the state that another one holds."""
        return f"unix:{holder.socket}"


async def _device_emptied(session: Session, within_s: float) -> bool:
    """Until a server that has died, or is being killed, has given back its device's memory: whether it has.

    On the cpu driver there is memory enough for both, and what the log holds nobody else writes any more.  A
    GPU may write into host memory until its context is gone.
    """
    process = session.server.process
    if not session.on_gpu:
        return True
    try:
        await asyncio.wait_for(process.memory_gone.wait(), within_s)
    except TimeoutError:
        return False
    return True
