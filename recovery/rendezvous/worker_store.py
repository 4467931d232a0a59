"""The `torch.distributed` store of a migratable job: one request per connection, so no worker holds one.

Each request and each answer is a line of JSON, with bytes in base64.  Nothing waits here: who waits for a key
asks again.  The socket lies in the job's directory (0700) and is the owner's alone; values are written down,
so a proxyd that adopts the job goes on serving them.  If another host leads the job, it is asked
instead: ranks of several hosts share one store.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import structlog

from understudy.protos import control_pb2 as pb
from understudy.recovery.machine.private_socket import bound_to
from understudy.recovery.rendezvous.forwarder import NOT_LED, NotPassedOn, StoreForwarder, nowhere
from understudy.recovery.rendezvous.store import (
    LARGEST_VALUE,
    LONGEST_KEY,
    MOST_DONE_OF_WORKERS,
    MOST_KEYS,
    Notes,
    Store,
)

log = structlog.get_logger()

SOCKET, VALUES = "store", "values"
"""Names in the directory of a job's relays (proxy_client/proxyd_store.py)."""
LONGEST_LINE = 2 * LARGEST_VALUE
LONGEST_ID = 64
_SPANS = b'{"do": "spans"}\n'
REQUEST_S = 30.0
"""For a client to say what it wants and to take the answer."""


async def settled() -> None:
    """Nothing else is to be done."""


class WorkerStore:
    """The store of one job."""

    def __init__(
        self,
        directory: Path,
        job: str = "",
        forwarder: StoreForwarder | None = None,
        spans: Callable[[], bool] = lambda: False,
        settle: Callable[[], Awaitable[None]] = settled,
    ) -> None:
        """`forwarder`: to whoever leads the job; `spans`: whether it may have ranks on other hosts.

        `settle` returns when what has been written outlives this host, too, if anything is to.
        """
        self._directory = directory
        self._job = job
        self._forwarder = forwarder or StoreForwarder(nowhere)
        self._spans, self._settle = spans, settle
        self._notes = Notes(directory / VALUES)
        self.store = Store(self._notes, MOST_DONE_OF_WORKERS)

    def close(self) -> None:
        """The job is over; `run` has been cancelled."""
        self._notes.close()

    async def run(self) -> None:
        """Serve until cancelled."""
        path = self._directory / SOCKET
        path.unlink(missing_ok=True)
        async with await asyncio.start_unix_server(
            self._serve, sock=bound_to(path), limit=LONGEST_LINE, backlog=1024
        ) as server:
            await server.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_S):
                line = await reader.readline()
            answer = await self.answer(line)  # that may be another leader's, and take longer
            async with asyncio.timeout(REQUEST_S):
                writer.write(answer + b"\n")
                await writer.drain()
        except (OSError, ValueError, TimeoutError) as problem:  # ValueError: a line that does not end
            log.warning("a worker's store request failed", problem=str(problem))
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def answer(self, line: bytes) -> bytes:
        """To one request, whatever it holds."""
        if line == _SPANS:
            return json.dumps({"spans": self._spans()}).encode()
        try:
            request = pb.WorkerStoreRequest(job=self._job, line=line)
            reply = await self._forwarder.ask(
                self._job, lambda stub: stub.AskWorkerStore, request, self.answer_here
            )
        except NotPassedOn as problem:  # nobody may lead the job for a while: whoever asks goes on asking
            kind = "later" if problem.code is NOT_LED else "error"
            return json.dumps({kind: str(problem)[:1000]}).encode()
        return bytes(reply.line)

    async def answer_here(self, asked: Any) -> pb.WorkerStoreReply:
        """The same, from what is stored here."""
        try:
            request = json.loads(asked.line)
            answer = await self._act(request["do"], request)
            await self._settle()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
            answer = {"error": f"the store cannot do that: {problem}"[:1000]}
        return pb.WorkerStoreReply(line=json.dumps(answer).encode())

    async def _act(self, what: str, request: dict[str, Any]) -> dict[str, Any]:
        store = self.store
        match what:
            case "check":
                return {"found": store.holds([_key(key) for key in request["keys"]])}
            case "count":
                return {"count": len(store)}
        key = _key(request["key"])
        match what:
            case "get":
                return {"value": _text(await store.get(key, 0) if store.holds([key]) else None)}
        request_id = _id(request.get("id", ""))
        if what == "delete":
            return {"found": store.delete(key, request_id)}
        if not store.holds([key]) and len(store) >= MOST_KEYS and store.done(request_id) is None:
            raise ValueError(f"it holds {MOST_KEYS} keys already")
        match what:
            case "set":
                await store.set(key, _bytes(request["value"]), request_id)
                return {}
            case "add":
                return {"count": await store.add(key, int(request["amount"]), request_id)}
            case "append":
                if store.done(request_id) is None:
                    known = await store.get(key, 0) if store.holds([key]) else b""
                    await store.set(key, _within((known or b"") + _bytes(request["value"])), request_id)
                return {}
            case "compare":
                return {"value": _text(await self._compare(key, request, request_id))}
        raise ValueError(f"there is no {what!r:.50}")

    async def _compare(self, key: str, request: dict[str, Any], request_id: str) -> bytes:
        """As TCPStore does it: a missing key counts as empty."""
        expected, desired = _bytes(request["expected"]), _bytes(request["value"])
        if self.store.done(request_id) is not None:
            return desired
        known = await self.store.get(key, 0) if self.store.holds([key]) else None
        if known is None and expected:
            return expected
        if known is not None and known != expected:
            return known
        await self.store.set(key, desired, request_id)
        return desired


def _key(key: object) -> str:
    if not isinstance(key, str) or len(key) > LONGEST_KEY:
        raise ValueError(f"a key is text of at most {LONGEST_KEY} letters")
    return key


def _id(text: object) -> str:
    if not isinstance(text, str) or len(text) > LONGEST_ID:
        raise ValueError(f"an id is text of at most {LONGEST_ID} letters")
    return text


def _bytes(text: object) -> bytes:
    if not isinstance(text, str):
        raise ValueError("a value is bytes in base64")
    return _within(base64.b64decode(text, validate=True))


def _within(value: bytes) -> bytes:
    if len(value) > LARGEST_VALUE:
        raise ValueError(f"a value has more than {LARGEST_VALUE} bytes")
    return value


def _text(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()
