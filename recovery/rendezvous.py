"""The store device servers meet at; in memory, keys begin with their job."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from recovery.control import pb, rpc

LARGEST_VALUE = 16 << 20
_LONGEST_WAIT_MS = 3_600_000


class Store:
    """Keys and values; waiting readers are woken."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = asyncio.Condition()

    async def set(self, key: str, value: bytes) -> None:
        """Store and wake."""
        async with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    async def get(self, key: str, timeout: float) -> bytes | None:
        """The value, waited for at most `timeout` seconds."""
        if key in self._values:
            return self._values[key]
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: key in self._values), timeout)
            except TimeoutError:
                return None
            return self._values[key]

    async def add(self, key: str, amount: int) -> int:
        """Add to a number kept as text, as c10d's stores do; a missing one counts as 0."""
        async with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            self._changed.notify_all()
            return total

    def holds(self, keys: list[str]) -> bool:
        """Whether all exist."""
        return all(key in self._values for key in keys)

    def delete(self, key: str) -> bool:
        """Whether there was one."""
        return self._values.pop(key, None) is not None

    def forget(self, prefix: str) -> None:
        """Drop every key of a job."""
        for key in [key for key in self._values if key.startswith(prefix)]:
            del self._values[key]

    def __len__(self) -> int:
        return len(self._values)


class RendezvousService(rpc.RendezvousServicer):  # type: ignore[misc]
    """The store over gRPC."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def Set(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> pb.StoreReply:
        if len(request.value) > LARGEST_VALUE:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"a value is larger than {LARGEST_VALUE} bytes"
            )
        await self._store.set(request.key, request.value)
        return pb.StoreReply(found=True)

    async def Get(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> pb.StoreReply:
        wait = min(max(request.timeout_ms, 0), _LONGEST_WAIT_MS) / 1000
        value = await self._store.get(request.key, wait)
        return pb.StoreReply(found=value is not None, value=value or b"")

    async def Add(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> pb.StoreReply:
        try:
            count = await self._store.add(request.key, request.amount)
        except ValueError:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{request.key} holds no number")
            raise
        return pb.StoreReply(found=True, count=count)

    async def Check(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> pb.StoreReply:
        found = self._store.holds(list(request.keys))
        return pb.StoreReply(found=found, count=int(found))

    async def Delete(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> pb.StoreReply:
        found = self._store.delete(request.key)
        return pb.StoreReply(found=found, count=int(found))
