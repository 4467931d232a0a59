"""Sending a worker to another host: dumped and stopped here, shipped, restored there; one of them runs.

Until its source says `StartWorker` the other copy is stopped; once it may have been said, the one here is
released (worker_state.py), whatever happens to this proxyd.  So there are never two that run.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from understudy.protos import control_pb2 as pb
from understudy.recovery.base.background import to_its_end
from understudy.recovery.migration.relay.orders import OrderRefused, order
from understudy.recovery.migration.relay.outgoing_workers import Lost
from understudy.recovery.migration.relay.whereabouts import LONGEST_PATIENCE_S
from understudy.recovery.migration.transfer.dumping import DumpedWorker, Dumping
from understudy.recovery.migration.transfer.moves import Moves
from understudy.recovery.migration.transfer.reception import SLOWEST, NotSent, Reception
from understudy.recovery.migration.transfer.stream import StreamPart, parts, read_ahead
from understudy.recovery.migration.worker_state import Away, Event, NoSuchStep

log = structlog.get_logger()

PATIENCE_S = 120.0


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
    moves: Moves, worker: DumpedWorker, destination: str, patience_s: float = PATIENCE_S
) -> Shipped:
    """To a host of the cluster; its device server must be parked, or gone.  Raises NotSent."""
    return await to_its_end(_Sending(moves, worker, destination, patience_s).run())


class _Sending(Dumping):
    def __init__(self, moves: Moves, worker: DumpedWorker, destination: str, patience_s: float) -> None:
        super().__init__(moves, worker, secrets.token_hex(16), patience_s)
        self._destination = destination
        self._there = Reception(moves, destination, self.move, self.who())

    async def run(self) -> Shipped:
        with self.alone():
            return await self._send()

    async def _send(self) -> Shipped:
        began = time.monotonic()
        await self.check()
        self.moves.outgoing.trust(self._destination)
        dumped = await self.dump()
        stopped = time.monotonic()
        try:
            header, files = await asyncio.to_thread(self._pack, dumped)
            await self._there.take_in(header, read_ahead(parts(header, files)))
            shipped = time.monotonic()
            restored = await self._there.restore()
            ready = time.monotonic()
        except BaseException as problem:
            await self._undo()
            if isinstance(problem, OSError):
                raise NotSent(f"{self.who()} stays: {problem.strerror or problem}") from problem
            raise
        pid = restored.pid
        await self._switch()
        ended = time.monotonic()
        await asyncio.to_thread(shutil.rmtree, self.worker.directory, True)
        log.info("a worker left", job=self.worker.job, rank=self.worker.rank,
                 destination=self._destination, bytes=self._there.sent)  # fmt: skip
        return Shipped(
            pid=pid, host=self._destination, bytes=self._there.sent, dump_s=float(dumped["dump_s"]),
            ship_s=shipped - stopped, restore_s=restored.seconds,
            switch_s=ended - ready, total_s=ended - began,
        )  # fmt: skip

    async def check(self) -> None:
        """And whether it could run there."""
        if self._destination == self.moves.here.host:
            raise NotSent(f"{self.who()} is on host {self._destination} already")
        await super().check()
        try:
            header = self.header()
        except OSError as problem:
            raise NotSent(f"{self.who()} was not moved: {problem.strerror}") from problem
        await self._there.consider(header)

    def patience_s(self, image_bytes: int) -> float:
        """Until it is there and restored, over the slowest network that is put up with."""
        return min(LONGEST_PATIENCE_S, super().patience_s(image_bytes) + image_bytes / SLOWEST)

    def _pack(self, dumped: dict[str, Any]) -> tuple[pb.WorkerHeader, list[StreamPart]]:
        """Raises OSError."""
        images = sorted(Path(str(dumped["images"])).glob("*.img"))
        logs = sorted(path for path in self.worker.directory.iterdir() if path.is_file())
        files = [StreamPart("image", path) for path in images] + [StreamPart("log", path) for path in logs]
        # Where its relay is, its output so far is.
        files += [StreamPart("output", path, sizes_only=self.incoming is None) for path in self.outputs()]
        return self.header_of_dump(dumped, images, logs), files

    async def _undo(self) -> None:
        """It goes on here; the other copy was never let run."""
        with contextlib.suppress(NotSent):
            await self._there.abandon()
        await self._resume()

    async def _resume(self) -> None:
        try:
            await self.resume()
        except OrderRefused as problem:
            raise NotSent(f"{self.who()} was not moved, and does not go on: {problem}") from problem

    # ------------------------------------------------------------------ the switch
    async def _switch(self) -> None:
        """From here on there is no way back unless the other host says that it does not run there."""
        away = Away(self._destination, self.move, sure=False)
        outgoing = self.moves.outgoing
        try:
            if self.incoming is None:
                outgoing.note(self.relay, away)
            else:
                self.incoming.release(away)
                self.moves.note(self.incoming)
            await order(self.relay, Event.RELEASE)
        except (OrderRefused, NoSuchStep, OSError) as problem:
            outgoing.forget(self.relay)
            await self._undo()
            raise NotSent(f"{self.who()} was not moved: {problem}") from problem
        try:
            refused = await outgoing.settle(self.relay, away, asked=False)
        except Lost as problem:
            await self._worker_lost(away, str(problem))
            raise NotSent(f"{self.who()} is lost: {problem}") from problem
        if refused:
            outgoing.forget(self.relay)
            await self._resume()
            raise NotSent(f"{self.who()} was not moved: {refused}")
        if self.incoming is not None:
            await self.moves.moved(self.incoming, self._destination)
        else:
            outgoing.went(self.relay, replace(away, sure=True))

    async def _worker_lost(self, away: Away, why: str) -> None:
        """It may run there, so it must not go on here."""
        if self.incoming is not None:
            return await self.incoming.worker_lost(why)
        self.moves.outgoing.follow(self.relay, away)  # which ends it
