"""The store device servers meet at; keys begin with their job.

It is written down too: servers that meet while proxyd dies go on with its successor, and notice nothing.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
from pathlib import Path
from typing import Any

import grpc.aio

from recovery.control import pb, rpc

LARGEST_VALUE = 16 << 20
FILE = "store"
_LONGEST_WAIT_MS = 3_600_000


class Notes:
    """What a store holds, line by line: ["key", "value in base64"], the last one of a key counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _open(path)

    def add(self, key: str, value: bytes) -> None:
        """Outlives us from here on."""
        os.write(self._file, json.dumps([key, base64.b64encode(value).decode()]).encode() + b"\n")

    def read(self) -> dict[str, bytes]:
        """All that is legible; the last line may have been cut by a death."""
        values: dict[str, bytes] = {}
        for line in self._path.read_bytes().splitlines():
            try:
                key, value = json.loads(line)
                values[str(key)] = base64.b64decode(value, validate=True)
            except (ValueError, TypeError):
                continue
        return values

    def replace(self, values: dict[str, bytes]) -> None:
        """Forget everything but `values`."""
        new = self._path.with_suffix(".new")
        new.unlink(missing_ok=True)
        os.close(self._file)
        self._file = _open(new)
        for key, value in values.items():
            self.add(key, value)
        new.rename(self._path)


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


class Store:
    """Keys and values; waiting readers are woken."""

    def __init__(self, notes: Notes | None = None) -> None:
        self._notes = notes
        self._values: dict[str, bytes] = {}
        if notes is not None:
            self._values = notes.read()
            notes.replace(self._values)  # nothing may be added to a line that was cut
        self._changed = asyncio.Condition()

    async def set(self, key: str, value: bytes) -> None:
        """Store and wake."""
        async with self._changed:
            self._put(key, value)
            self._changed.notify_all()

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        if self._notes is not None:
            self._notes.add(key, value)

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
            self._put(key, str(total).encode())
            self._changed.notify_all()
            return total

    def holds(self, keys: list[str]) -> bool:
        """Whether all exist."""
        return all(key in self._values for key in keys)

    def delete(self, key: str) -> bool:
        """Whether there was one."""
        if self._values.pop(key, None) is None:
            return False
        if self._notes is not None:
            self._notes.replace(self._values)
        return True

    def forget(self, prefix: str) -> None:
        """Drop every key of a job."""
        for key in [key for key in self._values if key.startswith(prefix)]:
            del self._values[key]
        if self._notes is not None:
            self._notes.replace(self._values)

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
