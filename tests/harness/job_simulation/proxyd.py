"""A host, and the proxyds that it has one after the other: put together as `recovery/daemon` does it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from hosts_simulation.lives import HostsLoop, Life
from hosts_simulation.network import Server as Served
from simulation.device import Device
from simulation.pool import Pool
from simulation.process import Process

from job_simulation.processes import KnownServer, Seen
from understudy.protos import control_pb2 as pb
from understudy.recovery.agent.host_agent import HostAgent, Told
from understudy.recovery.agent.open_jobs import OpenJobs
from understudy.recovery.agent_api.server import Server
from understudy.recovery.base.errors import Refused
from understudy.recovery.base.timing import TIMING
from understudy.recovery.config.settings import DeviceSpec, Settings
from understudy.recovery.history.recorder import Recorder
from understudy.recovery.host.leases import Leases
from understudy.recovery.host.servers import ServerPool
from understudy.recovery.host.spawner import Installation
from understudy.recovery.job_hosts.spans import Spans
from understudy.recovery.machine.runtime_directory import RuntimeDirectory
from understudy.recovery.membership.membership import Membership
from understudy.recovery.migration.transfer.header import Here
from understudy.recovery.rendezvous.store import Store
from understudy.recovery.snapshots.settings import PersistenceSettings
from understudy.recovery.state.jobs import Job
from understudy.recovery.takeover.adoption import Successor
from understudy.recovery.takeover.journaling import Journaling
from understudy.recovery.takeover.leftovers import Leftovers

if TYPE_CHECKING:
    from job_simulation.world import HostsWorld

LOOK_S, IMAGES_EVERY_S = 0.1, 0.5
LAUNCHER_PID = 900_000


class Host:
    """What is there of a host whether or not a proxyd runs."""

    def __init__(self, world: HostsWorld, name: str, ranks: list[int]) -> None:
        self.world, self.name, self.ranks = world, name, ranks
        self.launcher = Process(LAUNCHER_PID)
        self.workers: dict[int, Process] = {LAUNCHER_PID: self.launcher}
        """By their pids, and who has started them."""
        self.servers: set[int] = set()
        """Pids of all that there were."""
        self.journal = b""
        self.proxyd: Proxyd | None = None
        self.arriving = 0
        """Workers on their way here."""
        self.incoming: dict[int, pb.WorkerHeader] = {}
        """What came with workers that have arrived, by their pids here."""
        self.incoming_unheard: set[int] = set()
        """Of them, those that no proxyd has given a device."""
        self.launcher_ended = asyncio.Event()
        """All workers that were started here have ended."""
        self.back_after_s = 0.0
        """So long after a proxyd has died another one starts."""
        self.lost_at = self.cut_off_at = 0.0
        """When all of it went for good, and when it was cut off from all others and etcd; 0: it is not."""
        self.launched: dict[int, Process] = {}
        """Of each rank that was started here what its launcher takes for it."""

    def begin(self) -> Proxyd:
        """A proxyd, which follows the one before, if there was one."""
        self.proxyd = Proxyd(self, pb.Journal.FromString(self.journal) if self.journal else None)
        return self.proxyd

    @property
    def life(self) -> Life | None:
        """Of the proxyd that runs."""
        return self.proxyd.life if self.proxyd is not None and self.proxyd.life.alive else None

    def is_gone(self, now: float) -> bool:
        """Whether its record is, too."""
        since = self.lost_at or self.cut_off_at
        return bool(since) and now > since + TIMING.lease_s

    @property
    def serves(self) -> bool:
        """Whether a proxyd answers there."""
        return self.proxyd is not None and self.proxyd.life.alive and self.proxyd.serves.is_set()

    async def close_job(self) -> None:
        """Its launcher asks for that, once, and ends; of the end of one that got no answer proxyds know."""
        await self.launcher_ended.wait()
        if self.lost_at:
            return
        if (proxyd := self.proxyd) is not None and self.serves:
            closed = proxyd.life.start(proxyd.close_job())
            while proxyd.life.alive and not closed.done():
                await asyncio.sleep(LOOK_S)
        self.launcher.running = False
        self.world.tell_end(self.launcher)

    def tell_of_arrival(self, pid: int) -> None:
        """To the proxyd that runs, if one does; the next one will ask."""
        if self.proxyd is not None and self.serves:
            self.proxyd.ask(partial(self.proxyd.take_in, pid))

    def watched(self, pid: int, started: int = 0) -> Seen:
        """As Watched, and Watched.of."""
        process = self.workers[pid]
        return Seen(process, process.followers)


class HostPool(Pool):
    """As the ServerPool of one proxyd."""

    gpus: tuple[str, ...] = ()

    def __init__(self, host: Host, life: Life, spares: int) -> None:
        super().__init__(host.world, spares)
        self._host, self._life = host, life
        self._known: dict[int, KnownServer] = {}

    @property
    def servers(self) -> frozenset[Server]:
        """All that run, ready or not."""
        for device in self.ready:
            self.known(device.pid, device.device)
        return frozenset(one for one in self._known.values() if one.process.running)

    def make(self) -> Device:
        """A server that is ready."""
        device = super().make()
        self._host.servers.add(device.pid)
        return device

    def known(self, pid: int, name: str) -> KnownServer:
        """One of this host, as this proxyd knows it."""
        if pid not in self._known:
            device = cast("HostsWorld", self._world).by_pid[pid]
            self._known[pid] = KnownServer(device, name)
        return self._known[pid]

    def fill(self) -> None:
        """As Pool; who has died starts none."""
        if self._life.alive:
            super().fill()

    def _started(self) -> None:
        if self._life.alive:
            super()._started()

    async def take(self, device: str, timeout: float = 60.0) -> Server:
        """As ServerPool."""
        taken = cast(Any, await super().take(device, timeout))
        known = self.known(taken.pid, device)
        known.device = device
        return known

    def adopt(self, server: Server) -> None:
        """One of a predecessor's."""

    def retire(self, server: Any) -> None:
        """End it without waiting."""
        server.retired = True
        if isinstance(server, KnownServer):
            server.behind.retired = True
            self._world.later(self._chance.uniform(0.0001, 0.002), server.behind.kill)

    async def end(self, server: Any, grace: float = 0.0) -> None:
        """End it."""
        server.retired = True
        if isinstance(server, KnownServer):
            server.behind.retired = True
            await server.process.end(grace)


class Following(Successor):
    """As Successor, where processes are those of the world."""

    def _known(self, written: pb.JournaledServer) -> Any:
        self._asked.add((written.process.pid, written.process.start_ticks))
        return cast(Any, self._pool).known(written.process.pid, written.device)


class Proxyd:
    """One of them, from its start to its death."""

    agent: HostAgent
    spans: Spans
    arrived: Callable[[pb.WorkerHeader, int, Path], None]

    def __init__(self, host: Host, journal: pb.Journal | None) -> None:
        self.host, self._left = host, journal
        world = self.world = host.world
        self.life = Life(cast(HostsLoop, world.loop), host.name)
        self.life.on_death.append(lambda: world.died(self))
        self.serves = asyncio.Event()
        self.open = OpenJobs()
        self.life.start(self._live())

    async def _live(self) -> None:
        host, world = self.host, self.world
        count = len(host.ranks) + world.spare_devices
        persist = PersistenceSettings(world.folder / host.name) if world.folder is not None else None
        settings = Settings(
            DeviceSpec("cpu", count), Path(f"/{host.name}/socket"), spares=world.schedule.spares,
            optimizer_preimages="on" if world.schedule.optimizer_preimages else "off",
            snapshot_overhead=0.5 if world.schedule.snapshots else 0.0,
            validate_every=world.validate_every, persist=persist,
            cpu_image_every_s=IMAGES_EVERY_S if persist is not None else 0.0,
        )  # fmt: skip
        pool: Any = HostPool(host, self.life, world.schedule.spares)
        self.pool = pool
        names = settings.devices.names
        self.leases = Leases(names, cast(ServerPool, pool))
        runtime = cast(RuntimeDirectory, _Runtime(Path(f"/{host.name}"), world.folder))
        left = self._left
        for job in left.jobs if left is not None else ():
            for session in job.sessions:
                pool.lease(names[session.device_index])
        journaling = Journaling(settings, self.open, self.leases, cast(ServerPool, pool), runtime.path)
        told = Told(Recorder(), journaling.note, lambda job: None)
        installation = cast(Installation, SimpleNamespace(torch_version="2"))
        self.agent = HostAgent(
            settings, runtime, cast(ServerPool, pool), self.leases, installation, Store(), self.open, told
        )
        here = cast(Here, SimpleNamespace(host=host.name))
        membership = cast(Membership, _membership(world, host.name))
        self.spans = Spans(self.agent, cast(ServerPool, pool), membership, runtime, here)
        self.arrived = cast(Any, self.spans.moves).callbacks.arrived
        pool.fill()
        if left is not None:
            leftovers = Leftovers(runtime, left)
            await Following(leftovers, self.agent, cast(ServerPool, pool), self.spans).adopt()
        journaling.begin()
        self.agent.run_beside(journaling.run())
        for pid in list(self.host.incoming):
            self.take_in(pid)
        server = Served()
        self.spans.add_to(cast(Any, server))
        self.agent.run_beside(self.spans.run())
        world.network.servers[host.name] = self.life, server
        self.serves.set()

    @property
    def job(self) -> Job | None:
        """The one that there is."""
        return next(iter(self.open.jobs.values()), None)

    async def close_job(self) -> None:
        """As its launcher asks for."""
        with contextlib.suppress(Refused):  # it is closed already
            for name in list(self.open.jobs):
                await self.agent.close_job(name)

    def take_in(self, pid: int) -> None:
        """A worker has arrived, or was here when a proxyd died."""
        header, process = self.host.incoming[pid], self.host.workers[pid]
        if process.running:
            self.arrived(header, pid, Path(header.directory))
        self.host.incoming_unheard.discard(pid)

    def ask(self, what: Callable[[], Any]) -> None:
        """Somebody of this host asks it something that does not take time."""

        async def asked() -> None:
            what()

        self.life.start(asked())


class _Runtime:
    """As RuntimeDirectory, without files."""

    def __init__(self, path: Path, folder: Path | None) -> None:
        self.path, self._folder = path, folder

    def rank_directory(self, job: str, rank: int, opening: int) -> Path:
        return self.path / job / (f"rank-{rank}-{opening}" if opening else f"rank-{rank}")

    def relays(self, job: str) -> Path:
        """A folder that is there if workers have relays."""
        return self._folder or self.path / "none"

    def remove_job(self, job: str) -> None:
        """There are no files."""


def _membership(world: HostsWorld, here: str) -> Any:
    async def standings() -> tuple[list[Any], None]:
        return [
            SimpleNamespace(record=SimpleNamespace(name=name), state=state, why="it gives no sign")
            for name in world.hosts
            if (state := world.state_of(name, here))
        ], None

    def known() -> tuple[dict[str, Any], int]:
        here_now = [host for host in world.hosts.values() if not host.is_gone(world.loop.time())]
        return {host.name: _known(host) for host in here_now}, 0

    hosts = SimpleNamespace(standings=standings, known=known)
    return SimpleNamespace(
        here=here, cluster="c", store=world.etcd, can_be_asked=True, hosts=hosts, data_probe=None,
        links=SimpleNamespace(to=partial(world.network.channel, here)),
    )  # fmt: skip


def _known(host: Host) -> Any:
    """As its record has it."""
    proxyd = host.proxyd
    free = len(proxyd.leases.free()) if proxyd is not None and host.serves else 0
    devices = [SimpleNamespace(state="idle")] * free
    return SimpleNamespace(
        lease=1, record=SimpleNamespace(address="h:1", node=SimpleNamespace(devices=devices))
    )
