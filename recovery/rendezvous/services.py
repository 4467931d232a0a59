"""The stores of jobs over gRPC: for device servers here, and for other hosts of jobs that this one leads."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from understudy.recovery.base.control import pb, rpc
from understudy.recovery.membership.network.links import caller
from understudy.recovery.rendezvous.forwarder import (
    NOT_LED,
    JobHosts,
    NotPassedOn,
    StoreForwarder,
    Where,
    nowhere,
)
from understudy.recovery.rendezvous.store import LARGEST_VALUE, LONGEST_KEY, MOST_KEYS, Store, StoreFull
from understudy.recovery.rendezvous.worker_store import WorkerStore

LONGEST_WAIT_MS = 3_600_000
MOST_WAITS = 8192
"""Of other hosts, at once: one for each rank there, if it has not all of its communicators."""
MOST_KEYS_AT_ONCE = 4096
"""Of one request."""
_INVALID = grpc.StatusCode.INVALID_ARGUMENT


class StoreAnswers:
    """What a store answers to each request; raises NotPassedOn for one that makes no sense."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def set(self, request: Any) -> pb.StoreReply:
        self._room(request.key)
        if len(request.value) > LARGEST_VALUE:
            raise NotPassedOn(f"a value is larger than {LARGEST_VALUE} bytes", _INVALID)
        try:
            await self._store.set(request.key, request.value)
        except StoreFull as problem:
            raise NotPassedOn(str(problem), _INVALID) from problem
        return pb.StoreReply(found=True)

    async def get(self, request: Any) -> pb.StoreReply:
        _refuse_too_many(request)
        if request.HasField("set"):
            await self.set(request.set)
        wait = min(max(request.timeout_ms, 0), LONGEST_WAIT_MS) / 1000
        values = await self._store.get_all(request.keys, wait)
        return pb.StoreReply(found=values is not None, values=values or ())

    async def add(self, request: Any) -> pb.StoreReply:
        self._room(request.key)
        try:
            count = await self._store.add(request.key, request.amount, request.id[:LONGEST_KEY])
        except StoreFull as problem:
            raise NotPassedOn(str(problem), _INVALID) from problem
        except ValueError as problem:
            raise NotPassedOn(
                f"{request.key} holds no number", grpc.StatusCode.FAILED_PRECONDITION
            ) from problem
        return pb.StoreReply(found=True, count=count)

    async def check(self, request: Any) -> pb.StoreReply:
        found = self._store.holds(list(request.keys))
        return pb.StoreReply(found=found, count=int(found))

    async def delete(self, request: Any) -> pb.StoreReply:
        found = self._store.delete(request.key)
        return pb.StoreReply(found=found, count=int(found))

    def _room(self, key: str) -> None:
        if len(key) > LONGEST_KEY:
            raise NotPassedOn(f"a key has at most {LONGEST_KEY} letters", _INVALID)
        if len(self._store) >= MOST_KEYS and not self._store.holds([key]):
            raise NotPassedOn(f"the store holds {MOST_KEYS} keys already", _INVALID)


class RendezvousService(rpc.RendezvousServicer):  # type: ignore[misc]
    """For device servers of this host: its own store, or that of whoever leads the job of the key."""

    def __init__(self, store: Store, where: Where = nowhere) -> None:
        self._here = StoreAnswers(store)
        self._forwarder = StoreForwarder(where)

    async def Set(self, request: Any, context: Any) -> pb.StoreReply:
        return await self._ask(request.key, lambda stub: stub.Set, request, self._here.set, context)

    async def Get(self, request: Any, context: Any) -> pb.StoreReply:
        request.timeout_ms = min(max(request.timeout_ms, 0), LONGEST_WAIT_MS)
        return await _told(context, self._get(request))

    async def _get(self, request: Any) -> pb.StoreReply:
        _refuse_too_many(request)
        key = _first(request)
        if request.HasField("set") and _job(request.set.key) != _job(key):
            raise NotPassedOn("what is set, and what is asked for, is of one job", _INVALID)
        if request.timeout_ms:
            return await self._forwarder.wait(key, request, self._here.get)
        return await self._forwarder.ask(_job(key), lambda stub: stub.Get, request, self._here.get)

    async def Add(self, request: Any, context: Any) -> pb.StoreReply:
        request.id = request.id or secrets.token_hex(16)
        return await self._ask(request.key, lambda stub: stub.Add, request, self._here.add, context)

    async def Check(self, request: Any, context: Any) -> pb.StoreReply:
        return await self._ask(_first(request), lambda stub: stub.Check, request, self._here.check, context)

    async def Delete(self, request: Any, context: Any) -> pb.StoreReply:
        return await self._ask(request.key, lambda stub: stub.Delete, request, self._here.delete, context)

    async def _ask(self, key: str, there: Any, request: Any, here: Any, context: Any) -> pb.StoreReply:
        return await _told(context, self._forwarder.ask(_job(key), there, request, here))


class PeerStoreService(rpc.MeetingServicer):  # type: ignore[misc]
    """For other hosts that have a part in a job: its store, if this one leads it.

    Nothing is passed on from here, so no request ever goes round in circles.
    """

    def __init__(
        self,
        store: Store,
        hosts: JobHosts,
        worker_store: Callable[[str], WorkerStore | None] = lambda job: None,
    ) -> None:
        """`worker_store`: that of the workers of a job, by its name."""
        self._here = StoreAnswers(store)
        self._hosts = hosts
        self._worker_store = worker_store
        self._waits = 0

    async def Set(self, request: Any, context: Any) -> pb.StoreReply:
        return await self._admitted([request.key], request, self._here.set, context)

    async def Get(self, request: Any, context: Any) -> pb.StoreReply:
        if self._waits >= MOST_WAITS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MOST_WAITS} requests wait already")
        self._waits += 1
        try:
            keys = [*request.keys, *([request.set.key] if request.HasField("set") else ())]
            return await self._admitted(keys, request, self._here.get, context)
        finally:
            self._waits -= 1

    async def Add(self, request: Any, context: Any) -> pb.StoreReply:
        if not request.id:
            await context.abort(_INVALID, "an addition from another host has an id")
        return await self._admitted([request.key], request, self._here.add, context)

    async def Check(self, request: Any, context: Any) -> pb.StoreReply:
        return await self._admitted(list(request.keys), request, self._here.check, context)

    async def Delete(self, request: Any, context: Any) -> pb.StoreReply:
        return await self._admitted([request.key], request, self._here.delete, context)

    async def AskWorkerStore(self, request: Any, context: Any) -> pb.WorkerStoreReply:
        if why := self._hosts.admits(request.job, caller(context)):
            await context.abort(NOT_LED, why)
        store = self._worker_store(request.job)
        if store is None:
            await context.abort(NOT_LED, f"there is no job {request.job:.64} with --migratable at its leader")
            raise AssertionError
        return await store.answer_here(request)

    async def _admitted(
        self, keys: list[str], request: Any, here: Callable[[Any], Awaitable[pb.StoreReply]], context: Any
    ) -> pb.StoreReply:
        jobs = {_job(key) for key in keys}
        if len(jobs) != 1 or not all("/" in key for key in keys):
            await context.abort(_INVALID, "keys begin with the name of their job, and are all of one")
        if why := self._hosts.admits(jobs.pop(), caller(context)):
            await context.abort(NOT_LED, why)
        return await _told(context, here(request))


def _refuse_too_many(request: Any) -> None:
    if not 0 < len(request.keys) <= MOST_KEYS_AT_ONCE:
        raise NotPassedOn(f"a request is for 1 to {MOST_KEYS_AT_ONCE} keys", _INVALID)


def _job(key: str) -> str:
    return key.partition("/")[0]


def _first(request: Any) -> str:
    """All keys of a request are of the job that its first one names."""
    return str(request.keys[0]) if request.keys else ""


async def _told(context: Any, work: Awaitable[pb.StoreReply]) -> pb.StoreReply:
    """What comes of it; if nothing does, whoever asked gets the sentence."""
    try:
        return await work
    except NotPassedOn as problem:
        await context.abort(problem.code, str(problem))
        raise
