"""Workers from other hosts: taken in, restored, let run, followed to their end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
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
from understudy.recovery.migration.worker_state import Away, Event, NoSuchStep, WorkerState, after

log = structlog.get_logger()

START_S = 20.0
END_S = 10.0
_WAS_LET_RUN = (WorkerState.RUNNING, WorkerState.DUMPED, WorkerState.RELEASED, WorkerState.ENDED)


class IncomingWorker:
    """One of them.  Refusal is raised where something cannot be done."""

    def __init__(self, delivery: Delivery, source: str, here: Here) -> None:
        self.header, self.places, self.source = delivery.header, delivery.places, source
        self.at_home = is_home(self.header, here.host)
        self.state = WorkerState.ARRIVING
        self.away: Away | None = None
        """Where it has gone on to, or may have."""
        self.pid = 0
        self.count = 0
        """Of those that were let run on this host: the newest tells where a worker is."""
        self.cleared = False
        """It has moved on, and nothing of it is here any more."""
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
        self._settled = asyncio.Event()
        """Where it runs is known, after it was not."""
        self._far: Watched | None = None
        self._process: asyncio.subprocess.Process | None = None
        """The same, if it is our child."""
        self._changed = asyncio.Event()
        self._outputs: Outputs | None = None
        self._signals: dict[int, int] = {}
        self._follower = 0
        self._followers = 0

    @property
    def moved(self) -> bool:
        """It has gone on to another host, or is at home again."""
        return self.state is WorkerState.REMOTE and self.away is not None and self.away.sure

    # ------------------------------------------------------------------ coming
    def receive(self) -> None:
        """All of it is here."""
        self._step(Event.RECEIVE)

    def _step(self, event: Event) -> None:
        try:
            self.state = after(self.state, event)
        except NoSuchStep as problem:  # it was dropped meanwhile
            raise Refusal(str(problem)) from problem

    async def restore(self) -> float:
        """As a stopped process; answers seconds."""
        header = self.header
        assert self._here.criu is not None
        try:
            if not self.at_home:
                await self._start_far_relay()
            done = await order(
                self.places.relay, Event.RESTORE, criu=str(self._here.criu.path.absolute()),
                images=str(self._delivery.images), worker=header.worker, pids=list(header.pids),
                stopped=list(header.stopped), signals_done=self.signals_done,
            )  # fmt: skip
            self.pid = await asyncio.to_thread(pid_here, int(done["pid"]), int(done["namespace"]))
            self.worker = Watched(self.pid)
        except (OrderRefused, ProcessLookupError, KeyError, ValueError, OSError) as problem:
            raise Refusal(str(problem)) from problem
        self._delivery.drop_images()
        self._step(Event.RESTORE)
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
        if self.state in _WAS_LET_RUN or self.away is not None:
            return  # the answer did not arrive
        if self.state is not WorkerState.RESTORED:
            raise Refusal(f"it is {self.state} here")
        self._tell_far(b"stay\n")
        try:
            await order(self.places.relay, Event.RESUME)
        except OrderRefused as problem:
            if await self.place() != WorkerState.RUNNING:
                raise Refusal(str(problem)) from problem
        self._step(Event.RESUME)
        if self._far is not None and self._outputs is None:
            self._outputs = Outputs(self.places.relay, self._changed)

    async def place(self) -> str:
        """Where its init says that it is; empty: there is none."""
        with contextlib.suppress(OrderRefused):
            return str((await order(self.places.relay, "where")).get("state"))
        return ""

    def _tell_far(self, line: bytes) -> None:
        with contextlib.suppress(OSError):
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.write(line)

    async def await_end(self) -> None:
        """Until its relay here has ended, which is when the worker has, or is gone."""
        assert self._far is not None
        await self._far.ended.wait()
        self._become(Event.END)
        if self.state is WorkerState.REMOTE and self.away is not None and not self.away.sure:
            await self._settled.wait()
        self.gone.set()
        self._changed.set()

    def _become(self, event: Event) -> None:
        self.state = after(self.state, event)
        if self.state is WorkerState.ENDED:
            killed = self._lost or f"the relay of the worker on host {self._here.host} was killed"
            self.status, self.problem = self._account() or (int(signal.SIGKILL), killed)

    def _account(self) -> tuple[int, str] | None:
        """How the worker ended: a status, and what went wrong; None: its relay has left no account."""
        try:
            with open(self.places.relay / ENDED, "rb") as file:
                told = parse(file.read(LONGEST_ACCOUNT))
            return int(told["status"]), str(told.get("problem") or "")
        except (OSError, ValueError, KeyError, TypeError):
            return None

    # ------------------------------------------------------------------ a successor of this proxyd
    def record(self) -> pb.IncomingRecord:
        """For it."""
        relay = self._far.message() if self._far is not None else pb.Process()
        away = self.away
        return pb.IncomingRecord(
            header=self.header, source=self.source, relay=relay, count=self.count,
            away=pb.WorkerAway(host=away.host, move=away.move, sure=away.sure) if away is not None else None,
        )  # fmt: skip

    async def adopt(self, record: pb.IncomingRecord) -> str:
        """Go on with it; answers where its init says that the worker is ("": it has ended)."""
        if record.HasField("away"):
            self.away = Away(record.away.host, record.away.move, record.away.sure)
        self.count = int(record.count)
        self._far = Watched.of(record.relay.pid, record.relay.start_ticks)
        if self.away is not None and self.away.sure:
            self.state = WorkerState.REMOTE
            return self.state
        if not self.at_home:
            self._outputs = Outputs(self.places.relay, self._changed)
        try:
            where = await order(self.places.relay, "where")
            self.pid = await asyncio.to_thread(pid_here, int(where["pid"]), int(where["namespace"]))
            self.worker = Watched(self.pid)
        except (OrderRefused, ProcessLookupError, KeyError, ValueError):
            where = {}
        place = str(where.get("state", ""))
        if place in (WorkerState.REMOTE, "") and self.away is not None and self._account() is None:
            place = WorkerState.RELEASED  # ended here, for it runs there; or killed while it was released
        if place in (WorkerState.RUNNING, WorkerState.DUMPED):
            self.away = None
        self.state = WorkerState(place or WorkerState.RUNNING)  # that its relay has ended is noticed
        return place

    # ------------------------------------------------------------------ leaving
    def leave(self) -> None:
        """It is stopped and dumped; raises NoSuchStep if it has ended meanwhile."""
        self.state = after(self.state, Event.DUMP)

    def release(self, away: Away) -> None:
        """It may run there from now on; raises NoSuchStep if it has ended meanwhile."""
        self.state, self.away = after(self.state, Event.RELEASE), away
        self._settled.clear()

    def stay(self) -> None:
        """It was let run here again, and may have ended since."""
        over = self.state in (WorkerState.REMOTE, WorkerState.ENDED)
        self._is_settled(None, Event.GIVE_UP if over else Event.RESUME)
        self._pass_signals()

    async def does_not_go_on(self) -> None:
        """Its init does not answer: once it was released, nothing but an order lets it run here."""
        if self.state is not WorkerState.DUMPED:
            await self.worker_lost()

    async def worker_lost(self, why: str = "") -> None:
        """It does not run here, nor, as far as anybody can tell, where it was to go."""
        self._lost = why
        await self._end_far()
        self._become(Event.END)
        self._is_settled(None, Event.GIVE_UP)

    def has_moved(self, host: str) -> None:
        """It runs there."""
        self._is_settled(Away(host, "", sure=True), Event.REMOVE)

    def _is_settled(self, away: Away | None, event: Event) -> None:
        self.away = away
        self._become(event)
        self._settled.set()
        self._changed.set()

    def has_returned(self) -> None:
        """It runs under its own relay again; whoever sent it may ask about it still."""
        self._is_settled(Away(self._here.host, "", sure=True), Event.DISMISS)

    async def clear_away(self) -> None:
        """Its copy here has been ended; nothing stays that watched it."""
        await self._end_far()
        self._changed.set()

    async def drop(self) -> None:
        """It is not wanted here, or not any more; nothing of it stays."""
        dropped = not self.moved and self.state is not WorkerState.ENDED
        if dropped:
            self.away, self.state = None, after(self.state, Event.DISMISS)
            self._settled.set()
            if self.at_home and await self.place() == WorkerState.RESTORED:
                with contextlib.suppress(OrderRefused):
                    await order(self.places.relay, Event.REMOVE)
        await self._end_far()
        self._changed.set()
        if self._outputs is not None:
            self._outputs.close()
            self._outputs = None
        self.close()
        if self.at_home and not dropped:
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
        if self.state is not WorkerState.RUNNING or self.worker is None:
            return
        for number, kind in sorted(self._signals.items()):
            self.worker.send(signal.Signals(kind))
            self.signals_done = number
        self._signals.clear()
        self._changed.set()

    @property
    def followed(self) -> bool:
        """Somebody is told of it."""
        return self._followers > 0

    async def tell(self, request: pb.FollowRequest) -> AsyncIterator[pb.FollowReply]:
        """Output from these positions on, and what becomes of it."""
        self._followers += 1
        try:
            async for reply in self._news(request):
                yield reply
        finally:
            self._followers -= 1

    async def _news(self, request: pb.FollowRequest) -> AsyncIterator[pb.FollowReply]:
        self._follower += 1
        mine = self._follower
        positions = {position.name: position.offset for position in request.positions}
        done = 0
        self._changed.set()  # whoever followed before is not heard any more
        while self._follower == mine:
            self._changed.clear()
            state, away = self.state, self.away  # what it wrote before its end is there
            while self._outputs is not None and (piece := self._outputs.read(positions)) is not None:
                name, offset, data = piece
                positions[name] = offset + len(data)
                yield pb.FollowReply(name=name, offset=offset, data=data, signals_done=self.signals_done)
                done = self.signals_done
            if done != self.signals_done:
                done = self.signals_done
                yield pb.FollowReply(signals_done=done)
            if state is WorkerState.REMOTE and away is not None and away.sure:
                yield pb.FollowReply(moved_to=away.host)
                return
            dropped = state is WorkerState.REMOTE and away is None
            if dropped:
                self.status, self.problem = int(signal.SIGKILL), f"host {self._here.host} has ended it"
            if dropped or state is WorkerState.ENDED:
                yield pb.FollowReply(ended=True, status=self.status, problem=self.problem)
                return
            await self._changed.wait()

    def outputs(self) -> list[Path]:
        """What goes with it to the next host."""
        return [path for name in ("stdout", "stderr") if (path := self.places.relay / name).exists()]
