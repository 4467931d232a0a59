"""Workers from other hosts: taken in, restored, let run, followed to their end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
from enum import StrEnum
from pathlib import Path

import structlog

from understudy.protos import control_pb2 as pb
from understudy.recovery.base.own_modules import module_command
from understudy.recovery.machine.processes import Watched
from understudy.recovery.machine.runtime_directory import ALIVE
from understudy.recovery.migration.process.namespaces import pid_here
from understudy.recovery.migration.process.worker_init import SOCKET
from understudy.recovery.migration.relay.far_relay import ENDED, LONGEST_ACCOUNT
from understudy.recovery.migration.relay.orders import OrderRefused, order, parse
from understudy.recovery.migration.relay.outputs import Outputs
from understudy.recovery.migration.transfer.delivery import Delivery
from understudy.recovery.migration.transfer.header import Here, Refusal, is_home, is_signal

log = structlog.get_logger()

START_S = 20.0
END_S = 10.0


class Stage(StrEnum):
    """How far a worker from another host has come."""

    ARRIVING = "arriving"
    READY = "ready"
    RESTORING = "restoring"
    RESTORED = "restored"
    """Stopped: it does not run before its source says so."""
    RUNNING = "running"
    LEAVING = "leaving"
    """Stopped, for another host."""
    MOVED = "moved"
    ENDED = "ended"
    DROPPED = "dropped"


class IncomingWorker:
    """One of them.  Refusal is raised where something cannot be done."""

    def __init__(self, delivery: Delivery, source: str, here: Here) -> None:
        self.header, self.places, self.source = delivery.header, delivery.places, source
        self.at_home = is_home(self.header, here.host)
        self.stage = Stage.ARRIVING
        self.pid = 0
        self.count = 0
        """Of those that were let run on this host: the newest tells where a worker is."""
        self.cleared = False
        """It has moved on, and nothing of it is here any more."""
        self.moved_to = ""
        self.leaving_to = self.leaving_move = ""
        """Where it may run, or will."""
        self.signals_done = int(self.header.signals_done)
        self.status, self.problem = int(signal.SIGKILL), "its end was not seen"
        self.gone = asyncio.Event()
        """It does not run here any more."""
        self.decided = asyncio.Event()
        """Its source has let it run, or given the move up."""
        self.turn = asyncio.Lock()
        """Whoever decides about it."""
        self.worker: Watched | None = None
        self._delivery, self._here = delivery, here
        self._lost = ""
        """Why it has to end here."""
        self._far: Watched | None = None
        self._process: asyncio.subprocess.Process | None = None
        """The same, if it is our child."""
        self._changed = asyncio.Event()
        self._outputs: Outputs | None = None
        self._signals: dict[int, int] = {}
        self._follower = 0

    # ------------------------------------------------------------------ coming
    async def restore(self) -> float:
        """As a stopped process; answers seconds."""
        header = self.header
        assert self._here.criu is not None
        try:
            if not self.at_home:
                await self._start_far_relay()
            done = await order(
                self.places.relay, "restore", criu=str(self._here.criu.path.absolute()),
                images=str(self._delivery.images), worker=header.worker, pids=list(header.pids),
                stopped=list(header.stopped), signals_done=self.signals_done,
            )  # fmt: skip
            self.pid = await asyncio.to_thread(pid_here, int(done["pid"]), int(done["namespace"]))
            self.worker = Watched(self.pid)
        except (OrderRefused, ProcessLookupError, KeyError, ValueError, OSError) as problem:
            raise Refusal(str(problem)) from problem
        self._delivery.drop_images()
        self.stage = Stage.RESTORED
        return float(done.get("restore_s", 0.0))

    async def _start_far_relay(self) -> None:
        relay = self.places.relay
        self._process = await asyncio.create_subprocess_exec(
            *module_command("recovery.migration.relay.far_relay"), str(relay),
            str(self.places.runtime / ALIVE), stdin=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self._far = Watched(self._process.pid)
        deadline = time.monotonic() + START_S
        while not (relay / SOCKET).exists():
            if not self._far.running or time.monotonic() > deadline:
                raise Refusal("its relay does not start here")
            await asyncio.sleep(0.005)

    async def start(self) -> None:
        """Let it run; from now on it lives here."""
        if self.stage in (Stage.RUNNING, Stage.LEAVING, Stage.MOVED, Stage.ENDED):
            return  # the answer did not arrive
        if self.stage is not Stage.RESTORED:
            raise Refusal(f"it is {self.stage} here")
        self._tell_far(b"stay\n")
        try:
            await order(self.places.relay, "resume")
        except OrderRefused as problem:
            if await self.place() != "here":
                raise Refusal(str(problem)) from problem
        self.stage = Stage.RUNNING
        if self._far is not None and self._outputs is None:
            self._outputs = Outputs(self.places.relay, self._changed)

    async def place(self) -> str:
        """Where its init says that it is; empty: there is none."""
        with contextlib.suppress(OrderRefused):
            return str((await order(self.places.relay, "where")).get("place"))
        return ""

    def _tell_far(self, line: bytes) -> None:
        with contextlib.suppress(OSError):
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.write(line)

    async def await_end(self) -> None:
        """Until its relay here has ended, which is when the worker has, or is gone."""
        assert self._far is not None
        await self._far.ended.wait()
        if self.stage in (Stage.RUNNING, Stage.LEAVING):
            killed = self._lost or f"the relay of the worker on host {self._here.host} was killed"
            self.status, self.problem = self._account() or (int(signal.SIGKILL), killed)
            self.stage = Stage.ENDED
        self.gone.set()
        self._changed.set()

    def _account(self) -> tuple[int, str] | None:
        """How the worker ended: a status, and what went wrong; None: its relay has left no account."""
        try:
            with open(self.places.relay / ENDED, "rb") as file:
                told = parse(file.read(LONGEST_ACCOUNT))
            return int(told["status"]), str(told.get("problem") or "")
        except (OSError, ValueError, KeyError, TypeError):
            return None

    # ------------------------------------------------------------------ a successor of this proxyd
    def record(self) -> pb.GuestRecord:
        """For it."""
        relay = self._far.message() if self._far is not None else pb.Process()
        return pb.GuestRecord(
            header=self.header, source=self.source, relay=relay, moved_to=self.moved_to,
            leaving_to=self.leaving_to, leaving_move=self.leaving_move, count=self.count,
        )  # fmt: skip

    async def adopt(self, record: pb.GuestRecord) -> str:
        """Go on with it; answers where its init says that the worker is ("": it has ended)."""
        self.leaving_to, self.leaving_move = record.leaving_to, record.leaving_move
        self.count = int(record.count)
        self._far = Watched.of(record.relay.pid, record.relay.start_ticks)
        if record.moved_to:
            self.stage, self.moved_to = Stage.MOVED, record.moved_to
            return ""
        if not self.at_home:
            self._outputs = Outputs(self.places.relay, self._changed)
        try:
            where = await order(self.places.relay, "where")
            self.pid = await asyncio.to_thread(pid_here, int(where["pid"]), int(where["namespace"]))
            self.worker = Watched(self.pid)
        except (OrderRefused, ProcessLookupError, KeyError, ValueError):
            where = {}
        place = str(where.get("place", ""))
        if place in ("away", "") and self.leaving_to and self._account() is None:
            place = "bound"  # ended here, for it runs there; or killed while it was bound
        if place in ("here", "held"):
            self.leaving_to = self.leaving_move = ""
        stages = {"guest": Stage.RESTORED, "away": Stage.RESTORED, "bound": Stage.LEAVING}
        self.stage = stages.get(place, Stage.RUNNING)
        return place

    # ------------------------------------------------------------------ leaving
    def leave(self) -> None:
        """It is stopped and dumped."""
        self.stage = Stage.LEAVING

    def stay(self) -> None:
        """It runs again."""
        self.leaving_to = self.leaving_move = ""
        self.stage = Stage.RUNNING
        self._pass_signals()

    async def worker_lost(self, why: str = "") -> None:
        """It does not run here, nor, as far as anybody can tell, where it was to go."""
        self._lost = why
        self.leaving_to = self.leaving_move = ""
        await self._end_far()

    async def moved(self) -> None:
        """It runs elsewhere, and its copy here has been ended."""
        await self._end_far()
        self._changed.set()

    async def drop(self) -> None:
        """It is not wanted here, or not any more; nothing of it stays."""
        if self.stage not in (Stage.MOVED, Stage.ENDED):
            self.stage = Stage.DROPPED
            if self.at_home and await self.place() == "guest":
                with contextlib.suppress(OrderRefused):
                    await order(self.places.relay, "gone")
        await self._end_far()
        self._changed.set()
        if self._outputs is not None:
            self._outputs.close()
            self._outputs = None
        self.close()
        if self.at_home and self.stage is not Stage.DROPPED:
            return
        await asyncio.to_thread(self._delivery.discard)

    def close(self) -> None:
        """Do not look at its processes any more."""
        for watched in (self.worker, self._far):
            if watched is not None:
                watched.close()

    async def _end_far(self) -> None:
        if self._far is None:
            return
        await self._far.end(END_S)
        if self._process is not None:
            await self._process.wait()

    # ------------------------------------------------------------------ following
    def hear(self, request: pb.FollowRequest) -> None:
        """What its home says."""
        if self._outputs is not None:
            for position in request.positions:
                self._outputs.let_go(position.name, position.offset)
        for one in request.signals:
            if one.number > self.signals_done and is_signal(one.signal):
                self._signals[one.number] = one.signal
        self._pass_signals()

    def _pass_signals(self) -> None:
        """One that came while it is stopped may have to go to another host."""
        if self.stage is not Stage.RUNNING or self.worker is None:
            return
        for number, kind in sorted(self._signals.items()):
            self.worker.send(signal.Signals(kind))
            self.signals_done = number
        self._signals.clear()
        self._changed.set()

    async def tell(self, request: pb.FollowRequest) -> AsyncIterator[pb.FollowReply]:
        """Output from these positions on, and what becomes of it."""
        self._follower += 1
        mine = self._follower
        positions = {position.name: position.offset for position in request.positions}
        done = 0
        self._changed.set()  # whoever followed before is not heard any more
        while self._follower == mine:
            self._changed.clear()
            stage = self.stage  # what it wrote before its end is there
            while self._outputs is not None and (piece := self._outputs.read(positions)) is not None:
                name, offset, data = piece
                positions[name] = offset + len(data)
                yield pb.FollowReply(name=name, offset=offset, data=data, signals_done=self.signals_done)
                done = self.signals_done
            if done != self.signals_done:
                done = self.signals_done
                yield pb.FollowReply(signals_done=done)
            if stage is Stage.MOVED:
                yield pb.FollowReply(moved_to=self.moved_to)
                return
            if stage is Stage.DROPPED:
                self.status, self.problem = int(signal.SIGKILL), f"host {self._here.host} has ended it"
            if stage in (Stage.ENDED, Stage.DROPPED):
                yield pb.FollowReply(ended=True, status=self.status, problem=self.problem)
                return
            await self._changed.wait()

    def outputs(self) -> list[Path]:
        """What goes with it to the next host."""
        return [path for name in ("stdout", "stderr") if (path := self.places.relay / name).exists()]
