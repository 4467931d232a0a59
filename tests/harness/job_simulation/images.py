"""Stands in for CRIU: images of workers that run on, and hosts where workers run again as in their images."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from hosts_simulation.lives import LIFE
from simulation.log import Log
from simulation.programs import mix

from job_simulation.carrier import LONGEST_DUMP_S, LONGEST_SWITCH_S, LONGEST_WAY_S, Passage
from understudy.protos import control_pb2 as pb
from understudy.recovery.migration.process.imaging import Image
from understudy.recovery.migration.relay.outgoing_workers import Lost
from understudy.recovery.migration.transfer.dumping import DumpedWorker
from understudy.recovery.migration.transfer.header import VERSION
from understudy.recovery.migration.transfer.reception import NotSent
from understudy.recovery.migration.transfer.stream import Checksum
from understudy.recovery.migration.worker_state import Away

if TYPE_CHECKING:
    from job_simulation.world import HostsWorld

AGAIN_S = 1.0
FAILS = 0.03
"""Share of workers that CRIU cannot dump, or restore."""


class Images:
    """All that were taken, and the workers that are ready to run from one."""

    def __init__(self, world: HostsWorld) -> None:
        self._world = world
        self.chance = random.Random(mix(world.seed, 44))
        self._taken: list[Log] = []
        self._ready: dict[str, tuple[pb.WorkerHeader, Log, int, Passage]] = {}
        """Workers that are restored and stand still, by their moves; they outlive the proxyd there."""

    # ------------------------------------------------------------------ taking
    @asynccontextmanager
    async def image_of(
        self, _: Any, worker: DumpedWorker, running_again: Callable[[], None]
    ) -> AsyncIterator[Image]:
        """As `image_of`, on the host of the proxyd whose step runs; raises NotSent."""
        world, life = self._world, LIFE.get()
        assert life is not None
        try:
            await asyncio.sleep(self.chance.uniform(0.005, LONGEST_DUMP_S))
            process = world.hosts[life.host].workers.get(worker.pid)
            if process is None or not process.running:
                raise NotSent("it has ended")
            if world.troubles and self.chance.random() < FAILS:
                raise NotSent("CRIU could not dump it")
            self._taken.append(_as_it_is(world.placed[life.host, str(worker.directory)]))
        finally:
            running_again()
        yield Image(_parts(worker, life.host, len(self._taken) - 1), 0.01)

    # ------------------------------------------------------------------ restoring
    async def restore(self, header: pb.WorkerHeader, number: int, passage: Passage) -> int:
        """Its pid there."""
        await asyncio.sleep(self.chance.uniform(0.01, LONGEST_WAY_S))
        pid = self._world.carrier.new_pid()
        self._ready[header.move] = header, _as_it_is(self._taken[number]), pid, passage
        return pid

    async def start(self, away: Away) -> str | None:
        """Let it run there: empty if it does, else why it does not; None: no answer has come."""
        world, life = self._world, LIFE.get()
        assert life is not None
        there = world.hosts[away.host]
        await asyncio.sleep(self.chance.uniform(0.001, LONGEST_SWITCH_S))
        if world.network.is_cut(life.host, there.name) or not there.serves:
            return None
        if (ready := self._ready.pop(away.move, None)) is not None:
            header, log, pid, passage = ready
            passage.end()
            world.faults["came back"] += 1
            world.carrier.let_run(header, there, pid, log)
        elif not any(header.move == away.move for header in there.incoming.values()):
            return "it is not known"
        await asyncio.sleep(self.chance.uniform(0.001, LONGEST_SWITCH_S))
        lost = world.network.rough and self.chance.random() < 0.05
        return None if lost or world.network.is_cut(life.host, there.name) else ""

    def forget(self, move: str) -> None:
        """It is not wanted."""
        self._ready.pop(move, None)


class Reception:
    """As `Reception`: asks one host to take in one worker, as the proxyd whose step runs."""

    def __init__(self, world: HostsWorld, _: Any, host: str, move: str, who: str) -> None:
        self._world, self._move = world, move
        life = LIFE.get()
        assert life is not None
        self._source, self._there = world.hosts[life.host], world.hosts[host]
        self._passage: Passage | None = None
        self._number = -1
        self._header = pb.WorkerHeader()
        self.sent = 0

    def _check(self) -> None:
        self._world.carrier.check(self._source, self._there)

    async def consider(self, header: pb.WorkerHeader) -> None:
        """Raises NotSent."""
        await asyncio.sleep(self._world.images.chance.uniform(0.001, 0.05))
        self._passage = self._world.carrier.begin(header.rank, self._there)
        try:
            self._check()
        except NotSent:
            self._passage.end()
            raise

    async def take_in(self, header: pb.WorkerHeader, parts: AsyncIterator[pb.WorkerPart]) -> None:
        """Raises NotSent."""
        self._header = header
        async for part in parts:
            await asyncio.sleep(self._world.images.chance.uniform(0.001, LONGEST_WAY_S / 4))
            if part.WhichOneof("part") == "data":
                self._number = int.from_bytes(part.data.data, "little")
        self._check()

    async def restore(self) -> pb.MoveReply:
        """Raises NotSent."""
        images = self._world.images
        if self._world.network.rough and images.chance.random() < FAILS:
            raise NotSent("CRIU could not restore it")
        assert self._passage is not None
        pid = await images.restore(self._header, self._number, self._passage)
        self._check()
        return pb.MoveReply(pid=pid, seconds=0.1, output="nowhere")

    async def abandon(self) -> None:
        """Nothing waits for that."""
        self._world.images.forget(self._move)
        if self._passage is not None:
            self._passage.end()


class Outgoing:
    """As much of `OutgoingWorkers` as a job's leader uses, of one proxyd."""

    def __init__(self, world: HostsWorld) -> None:
        self._world = world
        self._doubts: list[str] = []
        self._lost: dict[str, str] = {}

    def hosts(self) -> frozenset[str]:
        """Where workers may be, and those that were given up."""
        return frozenset({*self._doubts, *self._lost})

    def trust(self, host: str) -> None:
        """It is back, or a worker is to go there."""
        self._lost.pop(host, None)

    def give_up(self, host: str, sentence: str) -> None:
        """It is lost."""
        self._lost[host] = sentence

    async def start_there_surely(self, away: Away, *, asked: bool = True) -> str:
        """As OutgoingWorkers; raises Lost."""
        self._doubts.append(away.host)
        try:
            while True:
                if (lost := self._lost.get(away.host)) is not None:
                    if asked:
                        raise Lost(lost)
                    return lost
                if (refused := await self._world.images.start(away)) is not None:
                    return refused
                asked = True
                await asyncio.sleep(AGAIN_S)
        finally:
            self._doubts.remove(away.host)


def _as_it_is(log: Log) -> Log:
    """The log at this moment, but for shadows, which images leave out."""
    made = copy.copy(log)
    made.ring = {place: copy.copy(commit) for place, commit in log.ring.items()}
    for commit in made.ring.values():
        commit.shadows, commit.readable = {}, False
    made.told, made.joined, made.published = dict(log.told), list(log.joined), list(log.published)
    made.waits = list(log.waits)
    return made


async def _parts(worker: DumpedWorker, home: str, number: int) -> AsyncIterator[pb.WorkerPart]:
    header = pb.WorkerHeader(
        version=VERSION, job=worker.job, rank=worker.rank, world=worker.world, home=home,
        directory=str(worker.directory), relay=str(worker.relay), generation=worker.generation,
        threads=worker.threads, asked_index=worker.asked_index,
    )  # fmt: skip
    data = number.to_bytes(8, "little")
    checksum = Checksum()
    checksum.add(0, data)
    yield pb.WorkerPart(header=header)
    yield pb.WorkerPart(file=pb.WorkerFile(kind="log", name="control", bytes=len(data)))
    yield pb.WorkerPart(data=pb.WorkerData(offset=0, data=data))
    yield pb.WorkerPart(file_end=pb.WorkerFileEnd(checksum=checksum.value))
    yield pb.WorkerPart(end=pb.WorkerEnd(files=1, bytes=len(data)))
