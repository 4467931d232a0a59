"""Workers that come and go between hosts, as one proxyd sees it: what others ask of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import structlog

from understudy import replay
from understudy.recovery.base.background import BackgroundTasks
from understudy.recovery.base.control import pb, rpc
from understudy.recovery.machine.processes import start_ticks
from understudy.recovery.machine.runtime_directory import SHARED_MEMORY
from understudy.recovery.membership.network.links import caller
from understudy.recovery.migration.incoming.directories import IncomingDirectories
from understudy.recovery.migration.incoming.incoming_worker import IncomingWorker
from understudy.recovery.migration.incoming.records import IncomingRecords
from understudy.recovery.migration.incoming.unfollowed import relay_has_ended
from understudy.recovery.migration.process.image_folders import ARRIVING, place_for, remove_unfinished
from understudy.recovery.migration.relay.orders import OrderRefused, order
from understudy.recovery.migration.relay.orphan_output import OrphanOutput
from understudy.recovery.migration.relay.outgoing_workers import Lost, OutgoingWorkers
from understudy.recovery.migration.transfer.delivery import Delivery, following
from understudy.recovery.migration.transfer.header import (
    VERSION,
    Here,
    Refusal,
    check_fit,
    check_form,
    is_home,
)
from understudy.recovery.migration.worker_state import Away, Event, WorkerState

log = structlog.get_logger()

DECISION_S = 150.0
"""So long what has arrived waits for its source to go on."""
ENDED_S = 3600.0
"""So long the home of a worker that has ended can hear of it."""
MOST_ARRIVING = 8
WAITS = (WorkerState.RECEIVED, WorkerState.RESTORED)
"""It has come, and was not let run yet."""


@dataclass(frozen=True)
class Callbacks:
    """For whoever runs the job."""

    arrived: Callable[[pb.WorkerHeader, int, Path], None] = lambda *_: None
    """A worker runs here: what was told of it, its pid as seen from here, its log's directory."""
    left: Callable[[pb.WorkerHeader, str], None] = lambda *_: None
    """It does not any more: "ended", "moved to HOST", "dropped"."""
    free_devices: Callable[[], int] = lambda: MOST_ARRIVING
    """So many workers can be taken in, those that are on their way included."""


class Moves(rpc.MovesServicer):  # type: ignore[misc]
    """The moves that one proxyd takes part in."""

    def __init__(
        self,
        here: Here,
        runtime: Path,
        channel_to: Callable[[str], grpc.aio.Channel],
        callbacks: Callbacks | None = None,
        images: Path | None = None,
        outputs: Path | None = None,
    ) -> None:
        """`channel_to`: raises NoLink; `images`: where they lie meanwhile ($TMPDIR or shared memory).

        `outputs`: where what workers print goes whose relay is gone ($TMPDIR).
        """
        self.here = here
        self.channel_to = channel_to
        self._callbacks = callbacks or Callbacks()
        self.images = images
        self._outputs = outputs or Path(tempfile.gettempdir())
        self.incoming: dict[str, IncomingWorker] = {}
        """By the directory of the relay: the newest."""
        self.outgoing = OutgoingWorkers(here.host, runtime, channel_to)
        self.dumped: set[Path] = set()
        """Relays of workers of which somebody here makes a dump, to send or to keep it."""
        self._runtime = runtime
        self._moves: dict[str, IncomingWorker] = {}
        self._directories = IncomingDirectories(runtime)
        self._background = BackgroundTasks("moves")
        self._arriving = 0
        self._under_way: set[asyncio.Task[pb.MoveReply]] = set()
        self.decision_s, self.ended_s = DECISION_S, ENDED_S
        self._records = IncomingRecords(runtime)

    # ------------------------------------------------------------------ beginning and end
    async def resume(self) -> None:
        """Go on with what a proxyd that died has left in the runtime directory; before other hosts ask."""
        for place in {SHARED_MEMORY, Path(tempfile.gettempdir()), self.images or SHARED_MEMORY}:
            await asyncio.to_thread(remove_unfinished, place)
        for record in sorted(self._records.read(), key=lambda one: int(one.count)):
            try:
                await self._adopt(record)
            except OSError as problem:
                log.error("a worker from another host cannot be adopted", job=record.header.job,
                          rank=record.header.rank, problem=str(problem))  # fmt: skip
        for incoming in list(self._moves.values()):
            if incoming.moved and not incoming.at_home and self._is_last(incoming):
                await incoming.clear_away()
                await incoming.drop()
                incoming.cleared = True
        await asyncio.to_thread(self._directories.remove_abandoned)
        self.outgoing.resume()

    async def _adopt(self, record: pb.IncomingRecord) -> None:
        header = record.header
        found = check_form(header)
        if is_home(header, self.here.host):
            return await self._adopt_at_home(record)
        delivery = Delivery(header, found, found.relay / "none", at_home=False)
        delivery.take_over()
        incoming = IncomingWorker(delivery, record.source, self.here)
        place = await incoming.adopt(record)
        self._moves[header.move] = incoming
        if incoming.moved:
            self.incoming[header.relay] = incoming
            incoming.cleared = True
            return
        self._directories.take_over(found.runtime)
        if incoming.state is WorkerState.REMOTE:  # nobody has let it run in time
            return await self._drop(incoming)
        self.note(incoming)
        log.info("a worker from another host was adopted", job=header.job, rank=header.rank, place=place)
        if incoming.state is WorkerState.RESTORED:
            self._background.start(self._await_decision(incoming))
            return
        incoming.decided.set()
        self._lives_here(incoming)
        if incoming.state is WorkerState.DUMPED:
            with contextlib.suppress(OrderRefused):
                await order(found.relay, Event.RESUME)
            incoming.stay()
        elif incoming.away is not None:
            self._background.start(self._decide(incoming, incoming.away))
        self._callbacks.arrived(header, incoming.pid, found.log)

    async def _adopt_at_home(self, record: pb.IncomingRecord) -> None:
        """One that was coming back: its source, which asks until it is answered, must hear that it has."""
        header = record.header
        found = check_form(header)
        incoming = IncomingWorker(
            Delivery(header, found, found.relay / "none", at_home=True), record.source, self.here
        )
        place = await incoming.adopt(record)
        incoming.close()
        if not incoming.moved:
            if place == WorkerState.RESTORED:
                with contextlib.suppress(OrderRefused):
                    await order(found.relay, Event.RESUME)
                place = await incoming.place()
            if place == WorkerState.REMOTE:  # it was never let run
                return self._records.remove(header.move)
            self._returned(incoming)
            if place:
                self._callbacks.arrived(header, incoming.pid, found.log)
        self._moves[header.move] = incoming
        incoming.cleared = True

    def _returned(self, incoming: IncomingWorker) -> None:
        """It runs at home again; that it has come stays known.  Raises OSError."""
        incoming.has_returned()
        incoming.cleared = True
        self.note(incoming)
        self.outgoing.forget(incoming.places.relay)

    async def _decide(self, incoming: IncomingWorker, away: Away) -> None:
        """Whether it runs where it was to go."""
        relay = incoming.places.relay
        try:
            refused = await self.outgoing.settle(relay, away)
        except Lost as problem:
            return await incoming.worker_lost(str(problem))
        if not refused:
            return await self.moved(incoming, away.host)
        try:
            await order(relay, Event.RESUME)
        except OrderRefused:  # it has been killed meanwhile
            return await incoming.worker_lost()
        incoming.stay()
        self.note(incoming)

    def _is_last(self, incoming: IncomingWorker) -> bool:
        """Whether what lies in its directories is its own."""
        relay = incoming.header.relay
        return all(one.count <= incoming.count for one in self._moves.values() if one.header.relay == relay)

    def note(self, incoming: IncomingWorker) -> None:
        """Raises OSError."""
        self._records.write(incoming.record())

    async def moved(self, incoming: IncomingWorker, host: str) -> None:
        """It has moved on; that it has stays known."""
        if self._moves.get(incoming.header.move) is not incoming:
            return  # it was dropped meanwhile; whoever has it now finds out
        incoming.has_moved(host)
        try:
            self.note(incoming)
        except OSError as problem:  # a successor asks there once more
            log.warning("where a worker went cannot be written down", job=incoming.header.job,
                        rank=incoming.header.rank, host=host, problem=problem.strerror)  # fmt: skip
        await incoming.clear_away()
        await incoming.drop()
        incoming.cleared = True
        self._directories.leave(incoming.places.runtime)

    def host_is_lost(self, host: str, sentence: str) -> None:
        """Relays here of workers there end, and workers that may run there do not go on here."""
        self.outgoing.give_up(host, sentence)

    def add_to(self, server: grpc.aio.Server) -> None:
        """What other hosts may ask about workers on their way."""
        rpc.add_MovesServicer_to_server(self, server)

    async def close(self) -> None:
        """proxyd stops: workers from elsewhere end."""
        await self._background.cancel()
        await self.outgoing.close()
        for incoming in list(self.incoming.values()):
            await self._drop(incoming)

    # ------------------------------------------------------------------ arriving
    async def ConsiderWorker(self, header: Any, context: Any) -> pb.MoveReply:
        try:
            if header.version != VERSION:
                raise Refusal(f"it is sent in version {header.version}, and {VERSION} is spoken here")
            await asyncio.to_thread(check_fit, header, self.here)
        except Refusal as refusal:
            return pb.MoveReply(error=f"host {self.here.host}: {refusal}")
        return pb.MoveReply()

    async def ReceiveWorker(self, parts: AsyncIterator[pb.WorkerPart], context: Any) -> pb.MoveReply:
        began = time.monotonic()
        incoming: IncomingWorker | None = None
        try:
            if self._arriving >= MOST_ARRIVING:
                raise Refusal(f"{MOST_ARRIVING} workers are arriving already")
            self._arriving += 1
            try:
                incoming = await self._receive(parts, caller(context))
            finally:
                self._arriving -= 1
        except Refusal as refusal:
            log.warning("a worker was not taken in", source=caller(context), reason=str(refusal))
            return pb.MoveReply(error=f"host {self.here.host}: {refusal}")
        self._background.start(self._await_decision(incoming))
        return pb.MoveReply(state=incoming.state.value, seconds=time.monotonic() - began)

    async def _receive(self, parts: AsyncIterator[pb.WorkerPart], source: str) -> IncomingWorker:
        parts = aiter(parts)
        first = await following(parts)
        if first is None or first.WhichOneof("part") != "header":
            raise Refusal("it does not say what comes")
        header = first.header
        found = check_form(header)
        await asyncio.to_thread(check_fit, header, self.here)
        if self._arriving + self._await_their_start() > self._callbacks.free_devices():
            raise Refusal("it has no free device")
        at_home = is_home(header, self.here.host)
        if header.move in self._moves or any(
            one.header.relay == header.relay and not one.cleared for one in self._moves.values()
        ):
            raise Refusal("it is here already")
        if at_home and not self.outgoing.expects(found.relay, source):
            raise Refusal(f"no worker is away from {header.relay}")
        ours = found.runtime == self._runtime
        if at_home != ours and not (ours and header.orphaned):  # its relay has ended, and it comes back
            raise Refusal(f"{found.runtime} is another one's")
        self._directories.enter(found.runtime)
        delivery: Delivery | None = None
        making = asyncio.ensure_future(asyncio.to_thread(self._images_folder, header.image_bytes))
        try:
            images = await asyncio.shield(making)
            delivery = Delivery(header, found, images, at_home)
            incoming = IncomingWorker(delivery, source, self.here)
            self._moves[header.move] = incoming
            await asyncio.to_thread(delivery.begin)
            while (part := await following(parts)) is not None:
                await asyncio.to_thread(delivery.take, part)
            if not delivery.complete:
                raise Refusal("a part of it is missing")
        except BaseException:  # who sends may hang up, and once more while this is cleared away
            forgetting = self._forget(header, found.runtime, making, delivery)
            await asyncio.shield(self._background.start(forgetting))
            raise
        incoming.receive()
        return incoming

    def _await_their_start(self) -> int:
        """How many have come and do not run yet."""
        return sum(incoming.state in WAITS for incoming in self._moves.values())

    async def _forget(
        self, header: pb.WorkerHeader, runtime: Path, making: asyncio.Future[Path], delivery: Delivery | None
    ) -> None:
        """Nothing stays of what has not arrived."""
        try:
            if delivery is not None:
                await asyncio.to_thread(delivery.discard)
            else:
                with contextlib.suppress(Refusal, OSError):
                    (await making).rmdir()
        finally:
            self._moves.pop(header.move, None)
            self._directories.leave(runtime)

    def _images_folder(self, wanted: int) -> Path:
        """Where there is room; raises Refusal."""
        try:
            return Path(tempfile.mkdtemp(prefix=ARRIVING, dir=place_for(wanted, self.images)))
        except OSError as problem:
            raise Refusal(f"no images can be written: {problem.strerror}") from problem

    async def _await_decision(self, incoming: IncomingWorker) -> None:
        """Who does not come back has kept its worker, or restores it."""
        while True:
            try:
                async with asyncio.timeout(self.decision_s):
                    await incoming.decided.wait()
                    return
            except TimeoutError:
                async with incoming.turn:  # it may be being restored, or let run
                    if incoming.state in WAITS:
                        log.warning("a worker's source did not come back", source=incoming.source)
                        return await self._drop(incoming)

    async def FinishMove(self, request: Any, context: Any) -> pb.MoveReply:
        return await self._to_its_end(self._finish, request, context)

    async def StartWorker(self, request: Any, context: Any) -> pb.MoveReply:
        return await self._to_its_end(self._start, request, context)

    async def AbandonMove(self, request: Any, context: Any) -> pb.MoveReply:
        return await self._to_its_end(self._abandon, request, context)

    async def _to_its_end(
        self, what: Callable[[IncomingWorker], Awaitable[pb.MoveReply | None]], request: Any, context: Any
    ) -> pb.MoveReply:
        """One after the other, and also if whoever asked is gone: grpc cancels what nobody waits for."""

        async def work() -> pb.MoveReply:
            incoming = self._moves.get(request.move)
            if incoming is None or incoming.source != caller(context):
                return self._unknown(request)
            async with incoming.turn:
                here = self._moves.get(request.move) is incoming
                return (await what(incoming) if here else None) or self._unknown(request)

        task = asyncio.ensure_future(work())
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return await asyncio.shield(task)

    async def _finish(self, incoming: IncomingWorker) -> pb.MoveReply | None:
        if incoming.state is not WorkerState.RECEIVED:
            return None
        try:
            seconds = await incoming.restore()
        except Refusal as refusal:
            await self._drop(incoming)
            return pb.MoveReply(error=f"host {self.here.host}: {refusal}")
        output = str(self._orphan_output(incoming).path("stdout")) if incoming.header.orphaned else ""
        return pb.MoveReply(state=incoming.state.value, pid=incoming.pid, seconds=seconds, output=output)

    async def _start(self, incoming: IncomingWorker) -> pb.MoveReply | None:
        fresh = incoming.state is WorkerState.RESTORED
        try:
            if fresh and incoming.header.orphaned:
                await asyncio.to_thread(self._orphan_output(incoming).prepare)
            if fresh:
                self._supervise(incoming)
                incoming.count = 1 + max(one.count for one in self._moves.values())
                self.note(incoming)
            await incoming.start()
        except (Refusal, OSError) as refusal:
            await self._drop(incoming)
            return pb.MoveReply(error=f"host {self.here.host}: {refusal}")
        if fresh:
            incoming.decided.set()
            if incoming.at_home:
                self._returned(incoming)
                await self.outgoing.returned(incoming.places.relay)
                incoming.close()
            else:
                self._lives_here(incoming)
            log.info("a worker arrived", job=incoming.header.job, rank=incoming.header.rank,
                     source=incoming.source, worker=incoming.pid)  # fmt: skip
            self._callbacks.arrived(incoming.header, incoming.pid, incoming.places.log)
        return pb.MoveReply(state=incoming.state.value, pid=incoming.pid)

    def _orphan_output(self, incoming: IncomingWorker) -> OrphanOutput:
        return OrphanOutput(incoming, self._outputs)

    async def _keep_output(self, incoming: IncomingWorker) -> None:
        """Its home will not hear of its end."""
        await self._orphan_output(incoming).run()
        if incoming.state is WorkerState.ENDED:
            await self._drop(incoming)

    def _supervise(self, incoming: IncomingWorker) -> None:
        with contextlib.suppress(replay.LogError):  # whoever opens a session for it will say so
            ours = os.getpid()
            replay.Log(str(incoming.places.log)).supervise(ours, start_ticks(ours))

    def _lives_here(self, incoming: IncomingWorker) -> None:
        """It is the one that runs, until it ends or moves on."""
        self.incoming[incoming.header.relay] = incoming
        self._background.start(self._await_end(incoming))
        kept = self._keep_output if incoming.header.orphaned else self._look_for_relay
        self._background.start(kept(incoming))

    async def _look_for_relay(self, incoming: IncomingWorker) -> None:
        if await relay_has_ended(incoming, self.channel_to):
            await self._drop(incoming)

    async def _await_end(self, incoming: IncomingWorker) -> None:
        await incoming.await_end()
        how = "dropped"
        if incoming.state is WorkerState.ENDED:
            how = "ended"
            self._background.start(self._drop_unless_asked(incoming))
        elif incoming.moved and incoming.away is not None:
            how = f"moved to {incoming.away.host}"
        self._callbacks.left(incoming.header, how)

    async def _drop_unless_asked(self, incoming: IncomingWorker) -> None:
        """Its home, which hears of the end and then has it dropped, may be lost."""
        await asyncio.sleep(self.ended_s)
        await self._drop(incoming)

    async def _abandon(self, incoming: IncomingWorker) -> pb.MoveReply | None:
        if incoming.state not in WAITS:
            return None
        await self._drop(incoming)
        return pb.MoveReply(state=incoming.state.value)

    def _unknown(self, request: Any) -> pb.MoveReply:
        return pb.MoveReply(error=f"host {self.here.host} knows of no such move ({request.move[:64]})")

    async def _drop(self, incoming: IncomingWorker) -> None:
        """Nothing of it stays here."""
        if self._moves.pop(incoming.header.move, None) is None or incoming.moved:
            return
        if self.incoming.get(incoming.header.relay) is incoming:
            del self.incoming[incoming.header.relay]
        incoming.decided.set()
        await incoming.drop()
        self._records.remove(incoming.header.move)
        self._directories.leave(incoming.places.runtime)

    # ------------------------------------------------------------------ following
    async def LookForRelay(self, request: Any, context: Any) -> pb.RelayReply:
        return pb.RelayReply(ended=await self.outgoing.has_ended(Path(request.relay)))

    async def FollowWorker(
        self, requests: AsyncIterator[pb.FollowRequest], context: Any
    ) -> AsyncIterator[pb.FollowReply]:
        requests = aiter(requests)
        first = await anext(requests, None)
        incoming = self.incoming.get(first.relay) if first is not None else None
        if incoming is None or first is None or incoming.header.home != caller(context):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"host {self.here.host} has no such worker")
            return
        incoming.hear(first)
        hearing = asyncio.create_task(self._hear(incoming, requests, first))
        try:
            async for reply in incoming.tell(first):
                yield reply
        finally:
            hearing.cancel()

    async def _hear(
        self, incoming: IncomingWorker, requests: AsyncIterator[pb.FollowRequest], first: pb.FollowRequest
    ) -> None:
        request: pb.FollowRequest | None = first
        while request is not None:
            incoming.hear(request)
            if request.ended:  # its end has arrived there; or nobody is there any more
                self._background.start(self._drop(incoming))
                return
            request = await anext(requests, None)
