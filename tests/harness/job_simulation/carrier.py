"""Stands in for the protocol of moves, which `hosts_simulation` has: a worker is at one host at any time."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from hosts_simulation.lives import LIFE, HostsLoop
from simulation.log import Log
from simulation.process import Process
from simulation.programs import mix

from understudy.protos import control_pb2 as pb
from understudy.recovery.base.background import to_its_end
from understudy.recovery.base.errors import Refused
from understudy.recovery.migration.places import Place
from understudy.recovery.migration.transfer.dumping import DumpedWorker
from understudy.recovery.migration.transfer.reception import NotSent
from understudy.recovery.migration.transfer.shipping import Shipped

if TYPE_CHECKING:
    from job_simulation.proxyd import Host
    from job_simulation.world import HostsWorld

LONGEST_DUMP_S, LONGEST_WAY_S, LONGEST_SWITCH_S = 0.4, 1.0, 0.3
FAILS = 0.15
"""Share of dumps that come to nothing."""


class Passage:
    """A worker on its way to a host, which keeps a device for it until that is over."""

    def __init__(self, rank: int, there: Host, under_way: set[int]) -> None:
        self._rank, self._there, self._under_way = rank, there, under_way
        self._over = False
        under_way.add(rank)
        there.arriving += 1

    def end(self) -> None:
        """Once is enough."""
        if not self._over:
            self._over = True
            self._under_way.discard(self._rank)
            self._there.arriving -= 1


class Carrier:
    """Takes workers from host to host."""

    def __init__(self, world: HostsWorld, loop: HostsLoop) -> None:
        self._world, self._loop = world, loop
        self._chance = random.Random(mix(world.seed, 43))
        self._pids = iter(range(2_000_000, 3_000_000))
        self._under_way: set[int] = set()
        self.ordered = 0
        self.moved = 0

    # ------------------------------------------------------------------ as somebody orders it
    def order(self, rank: int, destination: str) -> None:
        """As `recoveryctl migrate` does, on the host where the rank is."""
        host = self._world.home[rank]
        proxyd = host.proxyd
        if proxyd is None or not proxyd.life.alive or proxyd.job is None or destination == host.name:
            return
        session = proxyd.job.sessions.get(rank)
        if session is not None and session.active:
            self.ordered += 1
            proxyd.life.start(self._order(partial(proxyd.spans.move, session, Place(destination, ""))))

    def drain(self, host: Host, place: int) -> None:
        """As `recoveryctl drain` does."""
        proxyd = host.proxyd
        if proxyd is None or not proxyd.life.alive or not proxyd.serves.is_set():
            return
        self.ordered += 1
        names = proxyd.agent.settings.devices.names
        name = names[place % len(names)]
        proxyd.life.start(self._order(partial(proxyd.agent.planned.drain, Place("", name))))

    async def _order(self, begin: Callable[[], Awaitable[str]]) -> None:
        with contextlib.suppress(Refused):
            await begin()

    # ------------------------------------------------------------------ as proxyds carry it out
    async def send(self, moves: Any, worker: DumpedWorker, destination: str) -> Shipped:
        """As `send_worker`, within the proxyd whose step runs; raises NotSent."""
        return await to_its_end(self._send(worker, destination))

    async def _send(self, worker: DumpedWorker, destination: str) -> Shipped:
        world, chance, life = self._world, self._chance, LIFE.get()
        assert life is not None
        source, there = world.hosts[life.host], world.hosts[destination]
        if worker.rank in self._under_way:
            raise NotSent(f"rank {worker.rank} is being dumped already")
        passage = self.begin(worker.rank, there)
        try:
            self.check(source, there)
            await asyncio.sleep(chance.uniform(0.01, LONGEST_DUMP_S))
            if world.troubles and chance.random() < FAILS:
                raise NotSent("CRIU could not dump it")
            await asyncio.sleep(chance.uniform(0.01, LONGEST_WAY_S))
            self.check(source, there)
            former = world.workers[worker.rank]
            if not former.running:
                raise NotSent("it has ended")
            pid = self._switch(worker, source, there, former)
            passage.end()
            await asyncio.sleep(chance.uniform(0.001, LONGEST_SWITCH_S))
        finally:
            passage.end()
        return Shipped(pid, destination, 1, 0.0, 0.0, 0.0, 0.0, 0.0)

    def begin(self, rank: int, there: Host) -> Passage:
        """By the proxyd whose step runs; it ends with that, too."""
        life = LIFE.get()
        assert life is not None
        passage = Passage(rank, there, self._under_way)
        life.on_death.append(passage.end)
        return passage

    def new_pid(self) -> int:
        """Of a worker that comes to a host."""
        return next(self._pids)

    def check(self, source: Host, there: Host) -> None:
        """Raises NotSent."""
        proxyd = there.proxyd
        if self._world.network.is_cut(source.name, there.name) or proxyd is None or not there.serves:
            raise NotSent(f"host {there.name} is not reached")
        if there.arriving + len(there.incoming_unheard) > len(proxyd.leases.free()):
            raise NotSent(f"host {there.name} has no free device")

    def _switch(self, worker: DumpedWorker, source: Host, there: Host, former: Process) -> int:
        """From here on it runs there."""
        self.moved += 1
        self._world.faults["moved"] += 1
        header = pb.WorkerHeader(
            job=worker.job, rank=worker.rank, world=worker.world, directory=str(worker.directory),
            relay=str(worker.relay), generation=worker.generation, threads=worker.threads,
            asked_index=worker.asked_index, more=worker.more,
        )  # fmt: skip
        pid = self.new_pid()
        log = self._world.placed.pop((source.name, header.directory))
        arrived = self.let_run(header, there, pid, log)
        for host in self._world.hosts.values():
            if host.launched.get(header.rank) is former:
                host.launched[header.rank] = arrived
        former.running = False
        self._loop.outside(0.0005, self._world.tell_end, former)
        return pid

    def let_run(self, header: pb.WorkerHeader, there: Host, pid: int, log: Log) -> Process:
        """A worker that has come, with its log, of which the proxyd there hears."""
        world, rank = self._world, header.rank
        arrived = world.workers[rank] = world.begin_worker(there, pid, log)
        world.logs[rank] = world.placed[there.name, header.directory] = log
        world.home[rank] = there
        there.incoming[pid] = header
        there.incoming_unheard.add(pid)
        self._loop.outside(self._chance.uniform(0.001, 0.2), there.tell_of_arrival, pid)
        return arrived
