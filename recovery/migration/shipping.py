"""Sending a worker to another host: dumped and stopped here, shipped, restored there; one of them runs.

Until its source says `StartWorker` the other copy is stopped; once it may have been said, the one here is
bound (whereabouts.py), whatever happens to this proxyd.  So there are never two that run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import structlog

from recovery.control import answer, pb, rpc, trouble
from recovery.jobs import Session
from recovery.membership.links import NoLink
from recovery.migration.guests import Guest, Stage
from recovery.migration.header import VERSION
from recovery.migration.homes import ASK_S, Away, Lost
from recovery.migration.moves import Moves, place_for
from recovery.migration.orders import OrderRefused, order
from recovery.migration.parcel import Packed, data_bytes, parts, read_ahead
from recovery.migration.process_tree import read_tree
from recovery.migration.survey import lasting_obstacles, trouble_of_machine

log = structlog.get_logger()

SLOWEST = 10e6
"""Bytes a second."""
AT_LEAST_S = 60.0
RESTORE_S = 620.0
PATIENCE_S = 120.0
DUMPS = 3
DUMP_MARGIN = 64 << 20


class NotSent(Exception):
    """Its text is a sentence; the worker runs on where it was, unless it says otherwise."""


@dataclass(frozen=True)
class Passenger:
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
    def of(cls, session: Session, more: bytes = b"") -> Passenger:
        """The worker of a session whose device server is parked, or gone; it must have a relay."""
        return cls(
            job=session.job.name, rank=session.rank, world=session.world, directory=session.directory,
            relay=Path(session.relay).parent, pid=session.worker.pid, generation=session.generation,
            threads=session.threads, asked_index=session.asked_index, more=more,
        )  # fmt: skip


@dataclass(frozen=True)
class Shipped:
    """It runs there."""

    pid: int
    """As seen from there."""
    host: str
    bytes: int
    dump_s: float
    ship_s: float
    restore_s: float
    switch_s: float
    """From there being a copy until it runs."""
    total_s: float


async def send_worker(
    moves: Moves, passenger: Passenger, destination: str, patience_s: float = PATIENCE_S
) -> Shipped:
    """To a host of the cluster; its device server must be parked, or gone.  Raises NotSent."""
    return await asyncio.shield(_Sending(moves, passenger, destination, patience_s).run())


class _Sending:
    def __init__(self, moves: Moves, passenger: Passenger, destination: str, patience_s: float) -> None:
        self._moves, self._passenger, self._destination = moves, passenger, destination
        self._patience_s = patience_s
        self._move = secrets.token_hex(16)
        self._guest: Guest | None = moves.guests.get(str(passenger.relay))
        self._relay = passenger.relay
        self._sent = 0
        """Bytes that went over the network."""

    async def run(self) -> Shipped:
        began = time.monotonic()
        await self._check()
        self._moves.homes.trust(self._destination)
        dumped = await self._dump()
        stopped = time.monotonic()
        try:
            header, files = await asyncio.to_thread(self._pack, dumped)
            await self._ship(header, files)
            shipped = time.monotonic()
            restored = await self._ask("FinishMove", RESTORE_S)
            ready = time.monotonic()
        except BaseException as problem:
            await self._undo()
            if isinstance(problem, OSError):
                raise NotSent(f"{self._who()} stays: {problem.strerror or problem}") from problem
            raise
        pid = restored.pid
        await self._switch()
        ended = time.monotonic()
        await asyncio.to_thread(shutil.rmtree, self._passenger.directory, True)
        log.info("a worker left", job=self._passenger.job, rank=self._passenger.rank,
                 destination=self._destination, bytes=self._sent)  # fmt: skip
        return Shipped(
            pid=pid, host=self._destination, bytes=self._sent, dump_s=float(dumped["dump_s"]),
            ship_s=shipped - stopped, restore_s=restored.seconds,
            switch_s=ended - ready, total_s=ended - began,
        )  # fmt: skip

    def _who(self) -> str:
        return f"the worker of rank {self._passenger.rank}"

    # ------------------------------------------------------------------ before
    async def _check(self) -> None:
        who = self._who()
        if self._destination == self._moves.here.host:
            raise NotSent(f"{who} is on host {self._destination} already")
        if self._guest is not None and self._guest.stage is not Stage.RUNNING:
            raise NotSent(f"{who} cannot be moved: it is {self._guest.stage}")
        rank, pid = self._passenger.rank, self._passenger.pid
        obstacles = await lasting_obstacles(rank, pid, between_hosts=True)
        if reason := trouble_of_machine(self._moves.here.criu) or "; ".join(obstacles):
            raise NotSent(f"{who} cannot be moved: {reason}")
        try:
            question = self._stub().ConsiderWorker(self._header(), timeout=ASK_S, wait_for_ready=True)
            if reason := (await answer(question)).error:
                raise NotSent(f"{who} was not moved: {reason}")
        except OSError as problem:
            raise NotSent(f"{who} was not moved: {problem.strerror}") from problem
        except grpc.RpcError as problem:
            raise self._no_answer(problem) from problem

    async def _dump(self) -> dict[str, Any]:
        assert self._moves.here.criu is not None
        try:
            wanted = await asyncio.to_thread(memory_of, self._passenger.pid) + DUMP_MARGIN
            images = place_for(wanted, self._moves.images)
            free = shutil.disk_usage(images).free
            if free < wanted:
                raise NotSent(
                    f"{self._who()} stays: {images} has {free >> 20} MiB left, and its images may need "
                    f"{wanted >> 20}"
                )
            dumped = await self._order_dump(str(self._moves.here.criu.path.absolute()), str(images))
        except (OrderRefused, OSError) as problem:
            raise NotSent(f"{self._who()} was not moved: {problem}") from problem
        if self._guest is not None:
            self._guest.leave()
        return dumped

    async def _order_dump(self, criu: str, images: str) -> dict[str, Any]:
        """Raises OrderRefused.  CRIU may meet a process just when it is born, or ends."""
        for _ in range(DUMPS - 1):
            try:
                return await order(self._relay, "dump", criu=criu, images=images, patience_s=self._patience_s)
            except OrderRefused as problem:
                log.warning("a worker could not be dumped, and is tried again", reason=str(problem))
        return await order(self._relay, "dump", criu=criu, images=images, patience_s=self._patience_s)

    def _header(self) -> pb.WorkerHeader:
        """Raises OSError."""
        who, here = self._passenger, self._moves.here
        assert here.criu is not None
        return pb.WorkerHeader(
            version=VERSION, move=self._move, job=who.job, rank=who.rank, world=who.world,
            generation=who.generation, threads=who.threads, asked_index=who.asked_index,
            directory=str(who.directory), relay=str(self._relay),
            home=self._guest.header.home if self._guest is not None else here.host,
            working_directory=os.readlink(f"/proc/{who.pid}/cwd"),
            program=os.readlink(f"/proc/{who.pid}/exe"),
            kernel=here.machine.kernel, processor_features=here.machine.features,
            torch_version=here.torch_version, criu_version=here.criu.version_text,
            signals_done=self._guest.signals_done if self._guest is not None else 0, more=who.more,
        )  # fmt: skip

    def _pack(self, dumped: dict[str, Any]) -> tuple[pb.WorkerHeader, list[Packed]]:
        """Raises OSError."""
        who = self._passenger
        images = sorted(Path(str(dumped["images"])).glob("*.img"))
        logs = sorted(path for path in who.directory.iterdir() if path.is_file())
        outputs = [path for name in ("stdout", "stderr") if (path := self._relay / name).exists()]
        header = self._header()
        header.worker, header.image_bytes = int(dumped["pid"]), sum(path.stat().st_size for path in images)
        header.pids.extend(dumped["pids"])
        header.stopped.extend(dumped["stopped"])
        header.log_bytes = data_bytes(logs)
        files = [Packed("image", path) for path in images] + [Packed("log", path) for path in logs]
        # Where its relay is, its output so far is.
        files += [Packed("output", path, hollow=self._guest is None) for path in outputs]
        return header, files

    # ------------------------------------------------------------------ there
    def _stub(self) -> Any:
        try:
            return rpc.MovesStub(self._moves.channel_to(self._destination))
        except NoLink as problem:
            raise NotSent(f"{self._who()} was not moved: {problem}") from problem

    async def _ship(self, header: pb.WorkerHeader, files: list[Packed]) -> None:
        allowed = AT_LEAST_S + (header.image_bytes + header.log_bytes) / SLOWEST
        stream = self._counted(read_ahead(parts(header, files)))
        try:
            reply = await answer(self._stub().ReceiveWorker(stream, timeout=allowed))
        except grpc.RpcError as problem:
            raise self._no_answer(problem) from problem
        if reply.error:
            raise NotSent(f"{self._who()} was not moved: {reply.error}")

    async def _counted(self, stream: AsyncIterator[pb.WorkerPart]) -> AsyncIterator[pb.WorkerPart]:
        async for part in stream:
            self._sent += len(part.data.data)
            yield part

    async def _ask(self, what: str, within_s: float) -> Any:
        try:
            request = pb.MoveRequest(move=self._move)
            reply = await answer(getattr(self._stub(), what)(request, timeout=within_s))
        except grpc.RpcError as problem:
            raise self._no_answer(problem) from problem
        if reply.error:
            raise NotSent(f"{self._who()} was not moved: {reply.error}")
        return reply

    def _no_answer(self, problem: grpc.RpcError) -> NotSent:
        return NotSent(
            f"{self._who()} was not moved: host {self._destination} does not answer: {trouble(problem)}"
        )

    async def _undo(self) -> None:
        """It goes on here; the other copy was never let run."""
        with contextlib.suppress(NotSent):
            await self._ask("AbandonMove", ASK_S)
        await self._resume()

    async def _resume(self) -> None:
        try:
            await order(self._relay, "resume")
        except OrderRefused as problem:
            raise NotSent(f"{self._who()} was not moved, and does not go on: {problem}") from problem
        if self._guest is not None:
            self._guest.stay()

    # ------------------------------------------------------------------ the switch
    async def _switch(self) -> None:
        """From here on there is no way back unless the other host says that it does not run there."""
        away = Away(self._destination, self._move, sure=False)
        try:
            if self._guest is None:
                self._moves.homes.note(self._relay, away)
            else:
                self._guest.leaving_to, self._guest.leaving_move = self._destination, self._move
                self._moves.note(self._guest)
            await order(self._relay, "yield")
        except (OrderRefused, OSError) as problem:
            self._moves.homes.forget(self._relay)
            await self._undo()
            raise NotSent(f"{self._who()} was not moved: {problem}") from problem
        try:
            refused = await self._moves.homes.start_there_surely(away, asked=False)
        except Lost as problem:
            await self._lose(str(problem))
            raise NotSent(f"{self._who()} is lost: {problem}") from problem
        if refused:
            self._moves.homes.forget(self._relay)
            await self._resume()
            raise NotSent(f"{self._who()} was not moved: {refused}")
        with contextlib.suppress(OrderRefused):  # it has been killed meanwhile
            await order(self._relay, "gone")
        if self._guest is not None:
            await self._moves.moved(self._guest, self._destination)
        else:
            sure = Away(self._destination, self._move, sure=True)
            self._moves.homes.note(self._relay, sure)
            self._moves.homes.follow(self._relay, sure)

    async def _lose(self, why: str) -> None:
        """It may run there, so it must not go on here."""
        if self._guest is not None:
            return await self._guest.lose(why)
        away = Away(self._destination, self._move, sure=False)
        self._moves.homes.follow(self._relay, away)  # which ends it


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
