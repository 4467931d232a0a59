"""The way to the stores of a job that another host leads: a member passes on what it is asked.

What may be done twice is sent again until the leader, or its successor, has answered.  So may an addition: it
has an id, by which whoever did it before knows it.  Who waits for a key is told at once when the leader
changes or the link to it breaks, for a recovery is to follow and its peers will not come.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio

from understudy.recovery.base.control import answer, code_of, pb, rpc, trouble
from understudy.recovery.membership.network.links import LARGEST_MESSAGE, NoLink

Value = TypeVar("Value")

PATIENCE_S = 45.0
"""For a job to get another leader, and its host to answer."""
TRY_S = 5.0
PAUSE_S = 0.1
LOOK_S = 0.25
"""Between two looks at who leads, while a key is waited for."""
LARGEST_PASSED = LARGEST_MESSAGE - (64 << 10)
"""Bytes of a value that goes to another host."""
NOT_LED = grpc.StatusCode.ABORTED
"""Whoever was asked does not lead that job, or not yet."""
_LATER = (
    grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED, NOT_LED, None,
)  # fmt: skip


class NotPassedOn(RuntimeError):
    """Why a request was not answered, in a sentence."""

    def __init__(self, text: str, code: grpc.StatusCode = NOT_LED) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Leader:
    """The host that leads a job."""

    host: str
    channel: grpc.aio.Channel


Where = Callable[[str], Leader | None]
"""A job's name -> who leads it; None: this host.  Raises NoLink while nobody does."""


def nowhere(job: str) -> Leader | None:
    """Where no job spans hosts."""
    return None


class JobHosts(Protocol):
    """What is known of jobs that span hosts."""

    def where(self, job: str) -> Leader | None:
        """As Where."""

    def spans(self, job: str) -> bool:
        """Whether it may have ranks on other hosts."""

    def admits(self, job: str, host: str) -> str:
        """Empty if that host may use the stores of that job, and they are here; else why not."""


class StoreForwarder:
    """From here to whoever leads a job."""

    def __init__(self, where: Where, patience_s: float = PATIENCE_S) -> None:
        self._where = where
        self._patience_s = patience_s

    async def ask(
        self,
        job: str,
        there: Callable[[rpc.MeetingStub], Callable[..., Awaitable[Value]]],
        request: Any,
        here: Callable[[Any], Awaitable[Value]],
    ) -> Value:
        """A request that may be done twice, with the method `there` or `here`; raises NotPassedOn."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                leader = self._where(job)
                if leader is None:
                    return await here(request)
                _fits(request)
                method = there(rpc.MeetingStub(leader.channel))
                within = max(0.1, min(TRY_S, deadline - time.monotonic()))
                return await answer(method(request, timeout=within, wait_for_ready=True))
            except NoLink as problem:
                why = str(problem)
            except grpc.RpcError as problem:
                code = code_of(problem)
                why = trouble(problem)
                if code not in _LATER:
                    raise NotPassedOn(why, code) from problem
            if time.monotonic() > deadline:
                raise NotPassedOn(
                    f"whoever leads job {job} has not answered for {self._patience_s:g} s: {why}"
                )
            await asyncio.sleep(PAUSE_S)

    async def wait(
        self, key: str, request: Any, here: Callable[[Any], Awaitable[pb.StoreReply]]
    ) -> pb.StoreReply:
        """A Get that waits, for `key` and perhaps others; raises NotPassedOn."""
        job = key.partition("/")[0]
        wait_s = request.timeout_ms / 1000
        deadline = time.monotonic() + wait_s
        while True:
            try:
                leader = self._where(job)
                return await self._watched(key, leader, request, wait_s, here)
            except NoLink as problem:
                why = str(problem)
            except grpc.RpcError as problem:
                code = code_of(problem)
                why = trouble(problem)
                if code is not NOT_LED:
                    host = leader.host if leader is not None else "this one"
                    raise NotPassedOn(
                        f"waiting for {key} was given up: host {host}, which leads job {job}, "
                        f"cannot be asked: {why}"
                    ) from problem
            if time.monotonic() > deadline:
                raise NotPassedOn(f"nobody led job {job} while {key} was waited for: {why}")
            await asyncio.sleep(PAUSE_S)

    async def _watched(
        self,
        key: str,
        leader: Leader | None,
        request: Any,
        wait_s: float,
        here: Callable[[Any], Awaitable[pb.StoreReply]],
    ) -> pb.StoreReply:
        async def asked() -> pb.StoreReply:
            if leader is None:
                return await here(request)
            _fits(request)
            get = rpc.MeetingStub(leader.channel).Get
            return await answer(get(request, timeout=wait_s + TRY_S, wait_for_ready=True))

        task = asyncio.create_task(asked())
        try:
            while not (await asyncio.wait({task}, timeout=LOOK_S))[0]:
                if why := self._changed(key.partition("/")[0], leader):
                    raise NotPassedOn(f"waiting for {key} was given up: {why}")
            return task.result()
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.RpcError, NotPassedOn):
                await task

    def _changed(self, job: str, leader: Leader | None) -> str:
        """Empty, or what became of a job's leader."""
        try:
            now = self._where(job)
        except NoLink as problem:
            return f"job {job} has lost its leader: {problem}"
        return "" if now == leader else f"another leads job {job} now"


def _fits(request: Any) -> None:
    if request.ByteSize() > LARGEST_PASSED:
        raise NotPassedOn(
            f"what goes to the store of a job on several hosts has {LARGEST_PASSED} bytes at most",
            grpc.StatusCode.INVALID_ARGUMENT,
        )
