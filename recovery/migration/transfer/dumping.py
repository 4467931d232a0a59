"""The first half of sending a worker: whether it can be dumped, its dump, and what is told of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from understudy.protos import control_pb2 as pb
from understudy.recovery.migration.incoming.incoming_worker import IncomingWorker
from understudy.recovery.migration.preflight.process_tree import read_tree
from understudy.recovery.migration.preflight.survey import lasting_obstacles, trouble_of_machine
from understudy.recovery.migration.process.image_folders import place_for
from understudy.recovery.migration.relay.orders import OrderRefused, order
from understudy.recovery.migration.transfer.header import OUTPUTS, VERSION
from understudy.recovery.migration.transfer.moves import Moves
from understudy.recovery.migration.transfer.reception import NotSent
from understudy.recovery.migration.transfer.stream import data_bytes
from understudy.recovery.migration.worker_state import Event, NoSuchStep, WorkerState
from understudy.recovery.state.jobs import Session

log = structlog.get_logger()

DUMPS = 3
DUMP_MARGIN = 64 << 20


@dataclass(frozen=True)
class DumpedWorker:
    """A worker that is to go."""

    job: str
    rank: int
    world: int
    directory: Path
    """Of its log."""
    relay: Path
    """Directory of its relay."""
    pid: int
    generation: int = 0
    threads: int = 0
    asked_index: int = 0
    more: bytes = b""
    """For whoever runs the job, on the other host."""

    @classmethod
    def of(cls, session: Session, more: bytes = b"") -> DumpedWorker:
        """The worker of a session; it must have a relay."""
        return cls(
            job=session.job.name, rank=session.rank, world=session.world, directory=session.directory,
            relay=Path(session.relay).parent, pid=session.worker.pid, generation=session.generation,
            threads=session.threads, asked_index=session.asked_index, more=more,
        )  # fmt: skip


class Dumping:
    """Dumps one worker."""

    def __init__(self, moves: Moves, worker: DumpedWorker, move: str, patience_s: float) -> None:
        self.moves, self.worker, self.move = moves, worker, move
        self.relay = worker.relay
        self.incoming: IncomingWorker | None = moves.incoming.get(str(worker.relay))
        self._patience_s = patience_s

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else dumps it meanwhile; raises NotSent.

        Who waited for another host could find a worker that had left, and was back as another one.
        """
        if self.relay in self.moves.dumped:
            raise NotSent(f"{self.who()} cannot be moved: it is being dumped already")
        self.moves.dumped.add(self.relay)
        try:
            yield
        finally:
            self.moves.dumped.remove(self.relay)

    def who(self) -> str:
        """As sentences begin."""
        return f"the worker of rank {self.worker.rank}"

    async def check(self) -> None:
        """Whether it can be dumped; raises NotSent."""
        if self.incoming is not None and self.incoming.state is not WorkerState.RUNNING:
            raise NotSent(f"{self.who()} cannot be moved: it is {self.incoming.state}")
        rank, pid = self.worker.rank, self.worker.pid
        obstacles = await lasting_obstacles(rank, pid, between_hosts=True)
        if reason := trouble_of_machine(self.moves.here.criu) or "; ".join(obstacles):
            raise NotSent(f"{self.who()} cannot be moved: {reason}")

    async def dump(self) -> dict[str, Any]:
        """It is stopped then, until somebody says how it goes on, or patience ends; raises NotSent."""
        try:
            memory = await asyncio.to_thread(memory_of, self.worker.pid)
            wanted = memory + DUMP_MARGIN
            images = place_for(wanted, self.moves.images)
            free = shutil.disk_usage(images).free
            if free < wanted:
                raise NotSent(
                    f"{self.who()} stays: {images} has {free >> 20} MiB left, and its images may need "
                    f"{wanted >> 20}"
                )
            dumped = await self._order_dump(str(images), self.patience_s(memory))
            if self.incoming is not None:
                self.incoming.leave()
        except (OrderRefused, NoSuchStep, OSError) as problem:
            raise NotSent(f"{self.who()} was not moved: {problem}") from problem
        return dumped

    def patience_s(self, image_bytes: int) -> float:
        """So long it is stopped at most, if nobody says how it goes on."""
        return self._patience_s

    async def _order_dump(self, images: str, patience_s: float) -> dict[str, Any]:
        """Raises OrderRefused.  CRIU may meet a process just when it is born, or ends."""
        assert self.moves.here.criu is not None
        criu = str(self.moves.here.criu.path.absolute())
        wanted = {"criu": criu, "images": images, "patience_s": patience_s}
        for _ in range(DUMPS - 1):
            try:
                return await order(self.relay, Event.DUMP, **wanted)
            except OrderRefused as problem:
                log.warning("a worker could not be dumped, and is tried again", reason=str(problem))
        return await order(self.relay, Event.DUMP, **wanted)

    async def resume(self) -> None:
        """It goes on here; raises OrderRefused."""
        try:
            await order(self.relay, Event.RESUME)
        except OrderRefused:
            if self.incoming is not None:
                await self.incoming.does_not_go_on()
            raise
        if self.incoming is not None:
            self.incoming.stay()

    def header(self) -> pb.WorkerHeader:
        """What is told of it before it is dumped; raises OSError."""
        who, here, incoming = self.worker, self.moves.here, self.incoming
        assert here.criu is not None
        return pb.WorkerHeader(
            version=VERSION, move=self.move, job=who.job, rank=who.rank, world=who.world,
            generation=who.generation, threads=who.threads, asked_index=who.asked_index,
            directory=str(who.directory), relay=str(self.relay),
            home=incoming.header.home if incoming is not None else here.host,
            orphaned=incoming is not None and incoming.header.orphaned,
            working_directory=os.readlink(f"/proc/{who.pid}/cwd"),
            program=os.readlink(f"/proc/{who.pid}/exe"),
            kernel=here.machine.kernel, processor_features=here.machine.features,
            torch_version=here.torch_version, criu_version=here.criu.version_text,
            signals_done=incoming.signals_done if incoming is not None else 0, more=who.more,
        )  # fmt: skip

    def header_of_dump(self, dumped: dict[str, Any], images: list[Path], logs: list[Path]) -> pb.WorkerHeader:
        """And what is known once it is; raises OSError."""
        header = self.header()
        header.worker, header.image_bytes = int(dumped["pid"]), sum(path.stat().st_size for path in images)
        header.pids.extend(dumped["pids"])
        header.stopped.extend(dumped["stopped"])
        header.log_bytes = data_bytes(logs)
        return header

    def outputs(self) -> list[Path]:
        """Files of its relay that it writes to."""
        return [path for name in OUTPUTS if (path := self.relay / name).exists()]


def memory_of(root: int) -> int:
    """Bytes that images of a process and its descendants need at most; raises OSError."""
    total = 0
    for process in read_tree(root).processes:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total += _anonymous(process.pid)
        total += sum(one.bytes for one in process.mapped if one.path.endswith(" (deleted)"))
    return total


def _anonymous(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) << 10
    return 0
