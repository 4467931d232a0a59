"""Workers whose relay is here and who run elsewhere: their output comes here, signals go there.

What is known of one lies in its relay's directory (`away`), for a proxyd that succeeds this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import structlog

from understudy.recovery.base.control import answer, code_of, pb, rpc, trouble
from understudy.recovery.base.hostile_json import read
from understudy.recovery.base.whole_file import read_whole, write_whole
from understudy.recovery.membership.network.links import NoLink
from understudy.recovery.migration.process.worker_init import SOCKET
from understudy.recovery.migration.relay.orders import (
    LARGEST_ANSWER,
    OrderRefused,
    check_socket,
    order,
    parse,
)
from understudy.recovery.migration.transfer.header import OUTPUTS
from understudy.recovery.migration.worker_state import Away, Event, WorkerState

log = structlog.get_logger()

AWAY = "away"
LARGEST = 1 << 16
PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0)
ASK_S = 10.0
DISMISSALS = 600
RELAYS = "r.*/r*"
_AWAY = msgspec.json.Decoder(Away)


class Lost(Exception):
    """The worker is not to be found any more; its text is a sentence."""


@dataclass
class _Follower:
    away: Away
    task: asyncio.Task[None] | None = None
    signals: list[pb.NumberedSignal] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    lost: str = ""
    ended: bool = False


class OutgoingWorkers:
    """Follows the outgoing workers of one proxyd."""

    def __init__(self, host: str, runtime: Path, channel_to: Callable[[str], grpc.aio.Channel]) -> None:
        self._host, self._runtime, self._channel_to = host, runtime, channel_to
        self._followers: dict[Path, _Follower] = {}
        self._doubts: list[Away] = []
        """Of workers that are stopped here, and may run elsewhere."""
        self._lost: dict[str, str] = {}

    def resume(self) -> None:
        """What a proxyd that died has begun."""
        for path in self._runtime.glob(f"{RELAYS}/{AWAY}"):
            try:
                known = read(read_whole(path, LARGEST), _AWAY)
            except (OSError, ValueError) as problem:
                log.error("a worker that is away cannot be followed", path=str(path), problem=str(problem))
            else:
                self.follow(path.parent, known)

    def note(self, relay: Path, away: Away) -> None:
        """Before it has consequences; raises OSError."""
        write_whole(relay / AWAY, msgspec.json.encode(away))

    def forget(self, relay: Path) -> None:
        """It stays here after all."""
        (relay / AWAY).unlink(missing_ok=True)

    def follow(self, relay: Path, away: Away) -> None:
        """To its end, wherever it goes."""
        follower = _Follower(away)
        self._followers[relay] = follower
        follower.task = asyncio.create_task(self._follow(relay, follower))

    async def has_ended(self, relay: Path) -> bool:
        """Whether it was one of ours, and nobody watches a worker below it any more."""
        if relay.parent.parent != self._runtime:
            return False
        try:
            await order(relay, "where")
        except OrderRefused as problem:
            return isinstance(problem.__cause__, FileNotFoundError | ConnectionRefusedError)
        return False

    def went(self, relay: Path, away: Away) -> None:
        """It runs there, and is followed, if only to be dismissed: its relay may have ended meanwhile."""
        self._note_on(relay, away)
        self.follow(relay, away)

    def _note_on(self, relay: Path, away: Away) -> None:
        """Where it has gone since; a successor that does not know finds out."""
        try:
            self.note(relay, away)
        except OSError as problem:
            log.warning("where a worker went cannot be written down", relay=str(relay), host=away.host,
                        problem=problem.strerror)  # fmt: skip

    def expects(self, relay: Path, source: str) -> bool:
        """Whether its worker is away, at that host."""
        follower = self._followers.get(relay)
        return follower is not None and follower.away.host == source

    async def returned(self, relay: Path) -> None:
        """Its worker runs here again."""
        follower = self._followers.pop(relay, None)
        self.forget(relay)
        if follower is not None and follower.task is not None:
            follower.task.cancel()
            await asyncio.gather(follower.task, return_exceptions=True)

    def hosts(self) -> frozenset[str]:
        """Where workers of ours are, or may be, and hosts that were given up."""
        away = [*(follower.away for follower in self._followers.values()), *self._doubts]
        return frozenset({one.host for one in away} | self._lost.keys())

    def give_up(self, host: str, sentence: str) -> None:
        """That host is lost: relays of workers there end, and of those that may be there.

        What runs there still, as it was only cut off, is ended as soon as it answers.
        """
        self._lost[host] = sentence
        for relay, follower in self._followers.items():
            if follower.away.host == host and follower.away.sure and not follower.lost:
                follower.lost = sentence
                follower.task = asyncio.create_task(self._worker_lost(relay, follower, follower.task))

    def trust(self, host: str) -> None:
        """It is back, or a worker is to go there."""
        self._lost.pop(host, None)

    async def close(self) -> None:
        """proxyd stops, and nobody follows them any more: they end."""
        tasks = [follower.task for follower in self._followers.values() if follower.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for relay, follower in self._followers.items():
            if not follower.away.sure:
                continue
            if not follower.lost:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._dismiss(relay, follower), ASK_S)
            await _tell_end(relay, int(signal.SIGKILL), follower.lost or "proxyd was stopped")

    # ------------------------------------------------------------------ following
    async def _follow(self, relay: Path, follower: _Follower) -> None:
        try:
            await self._until_end(relay, follower)
        except Lost as problem:
            return await self._worker_lost(relay, follower, why=str(problem))
        if self._followers.get(relay) is follower:
            del self._followers[relay]

    async def _worker_lost(
        self, relay: Path, follower: _Follower, following: asyncio.Task[None] | None = None, why: str = ""
    ) -> None:
        """It is not to be found; if its host is lost, it is dismissed once that is back."""
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        why = follower.lost or why
        log.error("a worker that was away is lost", relay=str(relay), reason=why)
        await _tell_end(relay, int(signal.SIGKILL), why)
        if follower.lost:
            await self._dismiss(relay, follower)
        if self._followers.get(relay) is follower:
            del self._followers[relay]

    async def _until_end(self, relay: Path, follower: _Follower) -> None:
        failures = 0
        if not follower.away.sure and not await self._decide(relay, follower):
            return
        while True:
            try:
                init = await _connect(relay)
            except (OSError, ValueError):  # whoever watched the relay has ended it
                return await self._dismiss(relay, follower)
            hearing = asyncio.create_task(_hear_signals(init, follower))
            try:
                async for reply in self._replies(relay, follower, hearing):
                    failures = 0
                    if reply.ended:
                        await _tell_end(relay, reply.status, reply.problem)
                        return await self._dismiss(relay, follower)
                    if reply.moved_to:
                        follower.away = Away(reply.moved_to, "", sure=True)
                        self._note_on(relay, follower.away)
                        break
                    await self._take(relay, follower, init, reply)
            except grpc.RpcError as problem:
                if code_of(problem) is grpc.StatusCode.NOT_FOUND:
                    raise Lost(f"host {follower.away.host} has no such worker any more") from problem
                log.warning("a worker on another host cannot be followed", host=follower.away.host,
                            problem=trouble(problem))  # fmt: skip
            except NoLink as problem:
                log.warning("a worker on another host cannot be followed", problem=str(problem))
            finally:
                gone = hearing.done()
                hearing.cancel()
                await asyncio.gather(hearing, return_exceptions=True)
                init[1].close()
            if not gone:
                await asyncio.sleep(PAUSES_S[min(failures, len(PAUSES_S) - 1)])
                failures += 1

    async def _replies(
        self, relay: Path, follower: _Follower, hearing: asyncio.Task[None]
    ) -> AsyncIterator[pb.FollowReply]:
        call = rpc.MovesStub(self._channel_to(follower.away.host)).FollowWorker(
            _requests(relay, follower, hearing)
        )
        hearing.add_done_callback(lambda _: call.cancel())
        try:
            async for reply in call:
                yield reply
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
        finally:
            call.cancel()

    async def _take(self, relay: Path, follower: _Follower, init: Any, reply: pb.FollowReply) -> None:
        """Where the relay passes it on from."""
        if reply.data:
            await asyncio.to_thread(_append, relay, reply.name, reply.offset, reply.data)
            follower.news.set()
        if reply.signals_done:
            follower.signals = [one for one in follower.signals if one.number > reply.signals_done]
            init[1].write(json.dumps({"signals_done": reply.signals_done}).encode() + b"\n")

    async def _dismiss(self, relay: Path, follower: _Follower) -> None:
        """Its end has arrived, or nobody waits for it: its host is told until it answers, for a while."""
        for pause in (*PAUSES_S, *[PAUSES_S[-1]] * DISMISSALS):
            try:
                stub = rpc.MovesStub(self._channel_to(follower.away.host))
                if follower.away.move and follower.lost:  # it may not have been let run yet
                    await answer(stub.AbandonMove(pb.MoveRequest(move=follower.away.move), timeout=ASK_S))
                call = stub.FollowWorker(_last_word(relay), timeout=ASK_S)
                async for _ in call:
                    pass
            except grpc.RpcError as problem:
                if code_of(problem) is grpc.StatusCode.NOT_FOUND:
                    return
            except NoLink as problem:
                log.debug("a worker on another host is not dismissed yet", problem=str(problem))
            else:
                return
            await asyncio.sleep(pause)

    # ------------------------------------------------------------------ doubt
    async def _decide(self, relay: Path, follower: _Follower) -> bool:
        """Whether it runs there.

        A proxyd may have died before it bound the worker here; it may go on here by then, and no order came.
        """
        with contextlib.suppress(OrderRefused):
            await order(relay, Event.RELEASE)
        try:
            if (await order(relay, "where")).get("state") == WorkerState.RUNNING:
                self.forget(relay)
                return False
        except OrderRefused:
            log.debug("a relay has ended", relay=str(relay))
        try:
            refused = await self.settle(relay, follower.away)
        except Lost as problem:
            follower.lost = str(problem)
            raise
        if refused:
            with contextlib.suppress(OrderRefused):
                await order(relay, Event.RESUME)
            self.forget(relay)
            return False
        follower.away = replace(follower.away, sure=True)
        self._note_on(relay, follower.away)
        return True

    async def settle(self, relay: Path, away: Away, *, asked: bool = True) -> str:
        """Where a worker runs that was released here.  Empty: there, and not here; else why not there.

        Raises Lost if that host is given up: the worker may run there, as nothing fences who is only cut off.
        `asked`: whether somebody may have told it before to let the worker run.
        """
        refused = await self.start_there_surely(away, asked=asked)
        if not refused:
            with contextlib.suppress(OrderRefused):  # it has been killed meanwhile
                await order(relay, Event.REMOVE)
        return refused

    async def start_there_surely(self, away: Away, *, asked: bool = True) -> str:
        """As `settle`, with nothing of it here.  Only that host knows, so it is asked until it answers."""
        self._doubts.append(away)
        try:
            attempt = 0
            while True:
                if (lost := self._lost.get(away.host)) is not None:
                    if asked:
                        raise Lost(f"{lost}; the worker was on its way there, and may run there")
                    return lost
                try:
                    return await self._start_there(away)
                except (grpc.RpcError, RuntimeError) as problem:
                    asked = asked or isinstance(problem, grpc.RpcError)
                    if attempt == 0:
                        log.warning("it is not known whether a worker runs on another host", host=away.host,
                                    problem=_text(problem))  # fmt: skip
                    await asyncio.sleep(PAUSES_S[min(attempt, len(PAUSES_S) - 1)])
                    attempt += 1
        finally:
            self._doubts.remove(away)

    async def _start_there(self, away: Away) -> str:
        """Raises grpc.RpcError: nobody knows; or NoLink: it was not asked."""
        stub = rpc.MovesStub(self._channel_to(away.host))
        return str((await answer(stub.StartWorker(pb.MoveRequest(move=away.move), timeout=ASK_S))).error)


def _text(problem: Exception) -> str:
    return trouble(problem) if isinstance(problem, grpc.RpcError) else str(problem)


async def _connect(relay: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """As the one that hears of signals; raises OSError or ValueError."""
    check_socket(relay / SOCKET)
    reader, writer = await asyncio.open_unix_connection(str(relay / SOCKET), limit=LARGEST_ANSWER)
    writer.write(b'{"do": "stay"}\n')
    told = parse(await reader.readline())
    if "error" in told:
        writer.close()
        raise ValueError(str(told["error"]))
    return reader, writer


async def _hear_signals(init: tuple[asyncio.StreamReader, asyncio.StreamWriter], follower: _Follower) -> None:
    """Until the relay ends."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        while line := await init[0].readline():
            message = parse(line)
            one = pb.NumberedSignal(number=int(message["number"]), signal=int(message["signal"]))
            if all(known.number != one.number for known in follower.signals):
                follower.signals.append(one)
            follower.news.set()


async def _requests(
    relay: Path, follower: _Follower, hearing: asyncio.Task[None]
) -> AsyncIterator[pb.FollowRequest]:
    while not hearing.done():
        follower.news.clear()
        yield pb.FollowRequest(relay=str(relay), positions=_positions(relay), signals=follower.signals)
        await follower.news.wait()


async def _last_word(relay: Path) -> AsyncIterator[pb.FollowRequest]:
    yield pb.FollowRequest(relay=str(relay), ended=True)


def _positions(relay: Path) -> list[pb.OutputPosition]:
    found = []
    for name in OUTPUTS:
        with contextlib.suppress(OSError):
            found.append(pb.OutputPosition(name=name, offset=(relay / name).stat().st_size))
    return found


def _append(relay: Path, name: str, offset: int, data: bytes) -> None:
    """Where it belongs, so that what comes twice is there once."""
    if name not in OUTPUTS:
        raise Lost("what comes is no output")
    file = os.open(relay / name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size = os.fstat(file).st_size
        if offset > size:
            raise Lost(f"a part of its {name} is missing")
        view = memoryview(data)[size - offset :]
        while view:
            size += (written := os.pwrite(file, view, size))
            view = view[written:]
    finally:
        os.close(file)


async def _tell_end(relay: Path, status: int, problem: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        reader, writer = await _connect(relay)
        message = {"ended": status, "problem": problem[:1000]}
        writer.write(json.dumps(message).encode() + b"\n")
        await writer.drain()
        while await reader.readline():  # until it has ended
            pass
        writer.close()
