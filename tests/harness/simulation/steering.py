"""Stands in for gRPC between proxyd and a device server: requests that take time, get lost, or run late."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from simulation.programs import mix
from understudy import replay
from understudy.protos import control_pb2 as pb
from understudy.recovery.agent_api.commands import NotDone
from understudy.recovery.state.jobs import Job

if TYPE_CHECKING:
    from simulation.device import Device

Answer = Callable[[Any], None]

REPLIES = {
    "Park": pb.ParkReply,
    "Hold": pb.HoldReply,
    "LetGo": pb.LetGoReply,
    "Attach": pb.AttachReply,
    "Rewind": pb.RewindReply,
    "Restore": pb.RestoreReply,
    "WriteState": pb.WriteStateReply,
    "RebuildCommunicators": pb.RebuildReply,
    "Resume": pb.ResumeReply,
    "SetReplicated": pb.ReplicatedReply,
}
SHARED = "shared:"
STOPPED_S = 0.05
DURATIONS = {"Park": 0.003, "Attach": 0.01, "Rewind": 0.01, "RebuildCommunicators": 0.005, "Resume": 0.001}
"""Seconds, the longest."""
DECIDED = ("Attach", "Rewind", "Restore", "WriteState", "RebuildCommunicators")
"""What no server is asked for before it was decided."""


class Decisions:
    """Stands in for the journal."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.written = 0
        """Generation of the newest."""

    async def write(self) -> None:
        """From now on it may be carried out."""
        assert self._job.decision is not None
        self.written = self._job.decision.generation


@dataclass
class _Order:
    name: str
    request: Any
    answer: asyncio.Future[Any]
    fault: str = ""


class Stub:
    """What proxyd asks of a device server, done one after the other, also when nobody waits any more."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._world = device.world
        self._chance = random.Random(mix(device.world.seed, device.pid, 12))
        self._reach = random.Random(mix(device.world.seed, device.pid, 15))
        self._orders: deque[_Order] = deque()
        self._busy = False
        self._doing = ""
        self._open: list[asyncio.Future[Any]] = []
        self._cancel_rebuild: Callable[[], None] | None = None

    def __getattr__(self, name: str) -> Callable[..., asyncio.Future[Any]]:
        if name not in REPLIES:
            raise AttributeError(name)
        return lambda request, timeout: self._call(name, request, timeout)

    @property
    def waits(self) -> bool:
        """Whether whoever asks now has to wait, which does nobody who restores."""
        return self._busy and self._doing != "Restore"

    def break_off_rebuild(self) -> None:
        """It waits for peers that may not come."""
        if self._cancel_rebuild is not None:
            self._cancel_rebuild()

    def died(self) -> None:
        """The process is gone."""
        open_calls, self._open = self._open, []
        for answer in open_calls:
            self._world.later(0.0005, partial(_refuse, answer, "Socket closed"))

    # ------------------------------------------------------------------ the wire
    def _call(self, name: str, request: Any, timeout: float) -> asyncio.Future[Any]:
        if name in DECIDED and not self._world.is_decided(request.generation):
            raise self._world.violation(f"{name} is ordered before it was written that it was decided")
        answer: asyncio.Future[Any] = self._world.loop.create_future()
        order = _Order(name, request, answer)
        self._open.append(answer)
        self._world.later(self._chance.uniform(0.0001, 0.0008), lambda: self._arrives(order))
        timer = self._world.later(timeout, lambda: _refuse(answer, "Deadline Exceeded", late=True))
        answer.add_done_callback(lambda _: timer.cancel())
        return answer

    def _arrives(self, order: _Order) -> None:
        if not self._device.process.running:
            return _refuse(order.answer, "failed to connect to all addresses")
        if self._device.stall.stopped:  # its threads go on where they were, if they ever do
            self._world.later(STOPPED_S, lambda: self._arrives(order))
            return
        if order.answer.cancelled() and not (self._world.late_calls and self._chance.random() < 0.5):
            return
        order.fault = self._world.injector.meddle(self._device, order.name)
        if not self._device.process.running:
            return
        if order.name == "SetReplicated":
            self._device.inbox = set(order.request.handles)
            return self._reply(order, "")
        if (
            order.name == "Park"
            and order.request.generation >= self._device.newest_generation
            and self._cancel_rebuild is not None
        ):
            self._cancel_rebuild()
        if order.answer.cancelled():  # its thread was held up, and others came first
            self._world.later(self._chance.uniform(0.0, 0.02), lambda: self._enqueue(order))
        else:
            self._enqueue(order)

    def _enqueue(self, order: _Order) -> None:
        self._orders.append(order)
        self._next()

    def _reply(self, order: _Order, error: str, **values: Any) -> None:
        self._world.count_event()
        if order.fault == "lose-reply":
            return
        reply = (
            REPLIES[order.name](error=error, **values)
            if order.name != "SetReplicated"
            else pb.ReplicatedReply()
        )
        self._world.later(self._chance.uniform(0.0001, 0.0008), lambda: self._delivered(order.answer, reply))
        if order.fault == "kill-after":
            self._world.injector.kill(self._device)

    def _delivered(self, answer: asyncio.Future[Any], reply: Any) -> None:
        if answer in self._open:
            self._open.remove(answer)
            if not answer.done():
                answer.set_result(reply)

    # ------------------------------------------------------------------ the steering lock
    def _next(self) -> None:
        if self._busy or not self._orders or not self._device.process.running:
            return
        self._busy = True
        order = self._orders.popleft()
        self._doing = order.name
        if order.fault == "hang" or self._device.stall.hung:
            return  # holding the lock for ever
        old = order.request.generation < self._device.newest_generation
        if order.name == "Park" and self._device.state == "running" and not old:
            self._device.collectives.abort()
        pause = self._chance.uniform(0.0, DURATIONS.get(order.name, 0.01))
        self._world.later(pause, lambda: self._run(order))

    def _finished(self, order: _Order, error: str, **values: Any) -> None:
        self._busy = False
        if self._device.process.running:
            self._reply(order, error, **values)
            self._next()

    def _run(self, order: _Order) -> None:
        device, request = self._device, order.request
        if not device.process.running:
            return
        if order.fault == "kill-during":
            return self._world.injector.kill(device)
        if order.fault == "refuse":
            return self._finished(order, "RuntimeError: out of file descriptors")
        try:
            if request.generation < device.newest_generation:
                raise replay.LogError("a request of an older generation")
            device.newest_generation = request.generation
            match order.name:
                case "Park":
                    device.park()
                case "Hold":
                    device.hold()
                case "LetGo":
                    device.let_go()
                case "Attach":
                    device.attach(request)
                case "Rewind":
                    device.rewind(request.commit)
                case "Restore":
                    if request.from_snapshot and request.commit:
                        device.restore_snapshot(request.commit)
                    else:
                        device.restore(request.commit)
                    if unread := self._unread(request):
                        return self._finished(order, "not reached", unread=unread)
                    return self._copy(order, [(s, c) for s in request.sources for c in s.copies], {})
                case "WriteState":
                    device.need_parked()
                    if self._reach.random() < self._world.schedule.unread / 2:
                        return self._finished(order, "No space left on device")
                    return self._finished(order, "", name=str(device.socket))
                case "RebuildCommunicators":
                    return self._rebuild(order)
                case "Resume":
                    device.resume()
        except (replay.LogError, replay.RewindError) as problem:
            return self._finished(order, f"{type(problem).__name__}: {problem}")
        self._finished(order, "")

    def _rebuild(self, order: _Order) -> None:
        over = False

        def finish(error: str = "") -> None:
            nonlocal over
            if not over:
                over = True
                self._cancel_rebuild = None
                self._finished(order, error)

        def cancel() -> None:
            self._device.collectives.abort()
            finish("CollectiveError: cancelled")

        self._cancel_rebuild = cancel
        self._device.rebuild(order.request.generation, finish)

    def _unread(self, request: Any) -> list[int]:
        """Ranks whose servers this one does not reach now; it may reach storage."""
        unread = [
            source.rank for source in request.sources
            if not source.address.startswith(SHARED) and self._reach.random() < self._world.schedule.unread
        ]  # fmt: skip
        self._world.faults["unread"] += bool(unread)
        return unread

    def _copy(self, order: _Order, copies: list[tuple[Any, Any]], digests: dict[int, int]) -> None:
        """One buffer after the other, from servers that other requests reach meanwhile."""
        device = self._device
        if not device.process.running:
            return
        try:
            if not copies:
                roll = order.request.roll_forward
                device.complete_restore(digests, roll.lost)
                if order.request.HasField("roll_forward"):
                    device.roll_forward(roll)
                device.account.holds_state, device.account.restored_commit = True, order.request.commit
                return self._finished(order, "", copied_bytes=8 * len(digests))
            source, copy = copies.pop(0)
            holder = self._world.device_at(source.address.replace(SHARED, "unix:"))
            if holder is None or not holder.process.running:
                return self._finished(order, "RpcError: failed to connect to all addresses")
            if not order.answer.cancelled():
                self._world.about_to_copy(device, holder, source.rank, copy)
            equals = map(holder.peek, (copy.source_handle, *copy.other_source_handles))
            device.adopt_replica(copy.handle, next((one for one in equals if one is not None), None))
            digests[copy.handle] = copy.digest
        except (replay.LogError, replay.RewindError) as problem:
            return self._finished(order, f"{type(problem).__name__}: {problem}")
        self._world.later(self._chance.uniform(0.0, 0.002), lambda: self._copy(order, copies, digests))


def _refuse(answer: asyncio.Future[Any], why: str, *, late: bool = False) -> None:
    if not answer.done():
        answer.set_exception(NotDone(why, late=late))
