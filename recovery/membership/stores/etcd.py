"""The store of several hosts: etcd, by its v3 API.

Messages and stubs are those of aetcd.  Its client is not used: it knows neither TLS nor several endpoints,
and its watches do not say how far they have come.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio
from aetcd import rpc

from understudy.recovery.base.control import code_of, trouble
from understudy.recovery.membership.settings import Endpoint
from understudy.recovery.membership.stores.store import (
    Change,
    ClusterStore,
    ClusterStoreError,
    Compacted,
    DeleteRange,
    Entry,
    Event,
    LeaseEnded,
    Listing,
    Put,
    Unchanged,
    Unreachable,
)

Answer = TypeVar("Answer")

DEADLINE_S = 2.0
"""Of every call."""
PAGE = 48
"""Keys in one answer: it has room for as many of the largest values that etcd takes (1.5 MiB)."""
OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", 80 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),  # also the time that a connection gets to be made
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A watch waits for long; this is how it notices that the link is gone.  etcd allows a ping every 5 s.
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class EtcdStore(ClusterStore):
    """etcd behind one or more endpoints; the one that answered last is asked first."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        credentials: grpc.ChannelCredentials | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """`credentials`: for endpoints that are encrypted."""
        self.told = ", ".join(endpoint.target for endpoint in endpoints)
        self._deadline_s = deadline_s
        self._channels = [
            grpc.aio.secure_channel(endpoint.target, credentials, options=OPTIONS)
            if endpoint.encrypted
            else grpc.aio.insecure_channel(endpoint.target, options=OPTIONS)
            for endpoint in endpoints
        ]
        self._first = 0

    async def get(self, key: str) -> Entry | None:
        """As ClusterStore."""
        request = rpc.RangeRequest(key=key.encode())
        answer = await self._ask_any(lambda channel: rpc.KVStub(channel).Range, request)
        return _entry(answer.kvs[0]) if answer.kvs else None

    async def list(self, prefix: str) -> Listing:
        """As ClusterStore."""
        entries: list[Entry] = []
        key, revision = prefix.encode(), 0
        while True:
            request = rpc.RangeRequest(key=key, range_end=_end(prefix), limit=PAGE, revision=revision)
            answer = await self._ask_any(lambda channel: rpc.KVStub(channel).Range, request)
            entries += [_entry(one) for one in answer.kvs]
            revision = revision or answer.header.revision
            if not answer.more:
                return Listing(tuple(entries), revision)
            key = answer.kvs[-1].key + b"\0"

    async def transact(self, conditions: Sequence[Unchanged], changes: Sequence[Change]) -> int:
        """As ClusterStore."""
        request = rpc.TxnRequest(
            compare=[
                rpc.Compare(
                    result=rpc.Compare.EQUAL, target=rpc.Compare.MOD,
                    key=condition.key.encode(), mod_revision=condition.revision,
                )
                for condition in conditions
            ],
            success=[_operation(change) for change in changes],
        )  # fmt: skip
        # Asked once only: whoever asks another endpoint again might find its own change in the way.
        answer = await self._ask(lambda channel: rpc.KVStub(channel).Txn, request, self._deadline_s)
        return int(answer.header.revision) if answer.succeeded else 0

    async def grant(self, ttl_s: float) -> int:
        """As ClusterStore."""
        request = rpc.LeaseGrantRequest(TTL=math.ceil(ttl_s))
        answer = await self._ask_any(lambda channel: rpc.LeaseStub(channel).LeaseGrant, request)
        return int(answer.ID)

    async def keep(self, lease: int) -> float:
        """As ClusterStore."""

        def once(channel: grpc.aio.Channel) -> Callable[..., Awaitable[Any]]:
            async def call(request: Any, timeout: float) -> Any:
                stream = rpc.LeaseStub(channel).LeaseKeepAlive(iter([request]), timeout=timeout)
                answer = await stream.read()
                if answer is grpc.aio.EOF:
                    raise Unreachable(f"etcd at {self.told} broke off")
                stream.cancel()
                return answer

            return call

        answer = await self._ask_any(once, rpc.LeaseKeepAliveRequest(ID=lease))
        if answer.TTL <= 0:
            raise LeaseEnded(f"lease {lease:x} has ended")
        return float(answer.TTL)

    async def remaining(self, lease: int) -> tuple[float, float]:
        """As ClusterStore."""
        request = rpc.LeaseTimeToLiveRequest(ID=lease)
        answer = await self._ask_any(lambda channel: rpc.LeaseStub(channel).LeaseTimeToLive, request)
        return (float(answer.TTL), float(answer.grantedTTL)) if answer.TTL > 0 else (0.0, 0.0)

    async def revoke(self, lease: int) -> None:
        """As ClusterStore."""
        try:
            await self._ask_any(
                lambda channel: rpc.LeaseStub(channel).LeaseRevoke, rpc.LeaseRevokeRequest(ID=lease)
            )
        except LeaseEnded:
            return

    async def watch(self, prefix: str, after: int) -> AsyncGenerator[Event, None]:
        """As ClusterStore."""
        create = rpc.WatchCreateRequest(key=prefix.encode(), range_end=_end(prefix), start_revision=after + 1)
        stream = rpc.WatchStub(self._channels[self._first]).Watch()
        try:
            await stream.write(rpc.WatchRequest(create_request=create))
            while (answer := await stream.read()) is not grpc.aio.EOF:
                if answer.compact_revision:
                    raise Compacted(
                        f"changes up to revision {answer.compact_revision} are not known any more"
                    )
                if answer.canceled:
                    raise Unreachable(
                        f"etcd at {self.told} ended a watch: {answer.cancel_reason or 'no reason'}"
                    )
                for event in answer.events:
                    entry = None if event.type == rpc.Event.DELETE else _entry(event.kv)
                    yield Event(_text(event.kv.key), event.kv.mod_revision, entry)
            raise Unreachable(f"etcd at {self.told} ended a watch")
        except grpc.RpcError as problem:
            raise self._told(problem) from problem
        except asyncio.InvalidStateError as problem:  # written to a stream that has failed already
            raise Unreachable(f"etcd at {self.told} does not answer") from problem
        finally:
            stream.cancel()

    async def close(self) -> None:
        """As ClusterStore."""
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def _ask_any(self, method: Callable[[Any], Any], request: Any) -> Any:
        """What may be asked twice: at one endpoint after the other, each with its part of the deadline."""
        for attempt in range(len(self._channels)):
            try:
                return await self._ask(method, request, self._deadline_s / len(self._channels))
            except Unreachable:
                if attempt == len(self._channels) - 1:
                    raise
        raise AssertionError("no endpoint")

    async def _ask(self, method: Callable[[Any], Any], request: Any, within_s: float) -> Any:
        place = self._first
        try:
            return await method(self._channels[place])(request, timeout=within_s)
        except grpc.RpcError as problem:
            told = self._told(problem)
            if isinstance(told, Unreachable):
                self._first = (place + 1) % len(self._channels)
            raise told from problem

    def _told(self, problem: grpc.RpcError) -> ClusterStoreError:
        code = code_of(problem)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return Unreachable(f"etcd at {self.told} did not answer within {self._deadline_s:g} s")
        if code in _GONE:
            why = trouble(problem).rsplit(": ", 1)[-1]  # gRPC begins with what it has tried
            return Unreachable(f"etcd at {self.told} does not answer: {why}")
        if code is grpc.StatusCode.OUT_OF_RANGE:
            return Compacted(f"etcd at {self.told} was compacted meanwhile")
        if code is grpc.StatusCode.NOT_FOUND:
            return LeaseEnded("the lease has ended")
        return ClusterStoreError(f"etcd at {self.told} refused: {trouble(problem)}")


def _entry(pair: Any) -> Entry:
    return Entry(_text(pair.key), pair.value, pair.mod_revision, pair.lease)


def _text(key: bytes) -> str:
    return key.decode(errors="replace")  # others may write there; their keys are then nobody's


def _operation(change: Change) -> Any:
    if isinstance(change, DeleteRange):
        first, end = change.first.encode(), change.end.encode()
        return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=first, range_end=end))
    if isinstance(change, Put):
        key = change.key.encode()
        return rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=change.value, lease=change.lease))
    return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=change.key.encode()))


def _end(prefix: str) -> bytes:
    """The first key behind all that begin with it; the last byte of UTF-8 text is never 0xff."""
    raw = prefix.encode()
    return raw[:-1] + bytes([raw[-1] + 1])
