"""A ``torch.distributed`` store kept by proxyd, at which device servers meet to build communicators.

Each operation is one gRPC call, for however many keys; waiting is done by proxyd. ``cancel()`` ends every
wait at once, so that a server can be parked while it waits for a peer that will never come.
"""

from __future__ import annotations

import contextlib
import datetime
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, TypeVar

import grpc
import torch.distributed as dist

from understudy.protos import control_pb2 as pb
from understudy.protos import services as rpc

MOST_KEYS_AT_ONCE = 4096
"""Of one request (recovery/rendezvous/services.py)."""
Value = TypeVar("Value")


class RendezvousCancelled(RuntimeError):
    """The server was parked while it waited for its peers."""


class RendezvousGate:
    """Waits under way, to be cancelled together; closed until ``open()`` is called again.

    Requests may overtake each other: parked for one generation, a server must not wait for peers of an older.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits: set[grpc.Future | futures.Future[Any]] = set()
        self._closed = False
        self._oldest = 0

    def begin(self) -> None:
        """Open it for a session whose generations count anew."""
        with self._lock:
            self._closed, self._oldest = False, 0

    def open(self, generation: int) -> None:
        """Raises RendezvousCancelled if the server has been parked for a newer one."""
        with self._lock:
            if generation < self._oldest:
                raise RendezvousCancelled(f"parked for generation {self._oldest}, newer than {generation}")
            self._closed = False

    def cancel(self, generation: int) -> None:
        """End all waits, of older generations for good."""
        with self._lock:
            self._closed, self._oldest = True, max(self._oldest, generation)
            waits = list(self._waits)
        for wait in waits:
            wait.cancel()

    def run(self, work: Callable[[], Value]) -> Value:
        """What `work` answers; if the server is parked meanwhile it is left behind, and its result dropped.

        Gloo waits for a peer that is to connect until its time is out; nothing tells it that it has died.
        """
        future: futures.Future[Value] = futures.Future()

        def attempt() -> None:
            with contextlib.suppress(futures.InvalidStateError):  # nobody wants it any more
                try:
                    future.set_result(work())
                except Exception as error:  # noqa: BLE001 - whoever waits hears of it
                    future.set_exception(error)

        threading.Thread(target=attempt, name="connect", daemon=True).start()
        answer: Value = self.result(future)
        return answer

    def result(self, future: grpc.Future | futures.Future[Any]) -> Any:
        """Of a request to the store, or of what `run` began."""
        with self._lock:
            if self._closed:
                future.cancel()
                raise RendezvousCancelled("parked while waiting for the peers of a communicator")
            self._waits.add(future)
        try:
            return future.result()
        except (grpc.FutureCancelledError, futures.CancelledError, grpc.RpcError) as error:
            raise RendezvousCancelled(f"waiting for the peers of a communicator failed: {error}") from error
        finally:
            with self._lock:
                self._waits.discard(future)


class RendezvousStore(dist.Store):
    """Keys are prefixed with ``prefix`` (job, generation, communicator), so no generation sees another's.

    `exchanges`: of what members tell each other, each sets its own and then asks for that of all; it goes
    there with what it asks.
    """

    def __init__(
        self, channel: grpc.Channel, gate: RendezvousGate, prefix: str, timeout_ms: int,
        *, exchanges: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self._exchanges = exchanges
        self._own: pb.StoreSetRequest | None = None
        self._stub = rpc.RendezvousStub(channel)
        self._gate = gate
        self._prefix = prefix
        self._timeout_ms = timeout_ms

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def set(self, key: str, value: str | bytes) -> None:
        self._send_own()
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._own = pb.StoreSetRequest(key=self._key(key), value=data)
        if not self._exchanges:
            self._send_own()

    def _send_own(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            self._gate.result(self._stub.Set.future(own))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Of all that peers publish, waited for with one request."""
        return self._when_there(keys, self._timeout_ms)

    def has_extended_api(self) -> bool:
        """So that Gloo asks for the addresses of all its peers at once (backends.py)."""
        return True

    def _when_there(self, keys: Sequence[str], limit_ms: int) -> list[bytes]:
        values: list[bytes] = []
        for first in range(0, len(keys), MOST_KEYS_AT_ONCE):
            some = keys[first : first + MOST_KEYS_AT_ONCE]
            own, self._own = self._own, None
            request = pb.StoreGetRequest(keys=[self._key(key) for key in some], timeout_ms=limit_ms, set=own)
            reply = self._gate.result(self._stub.Get.future(request))
            if not reply.found:
                what = some[0] if len(some) == 1 else f"all of {some[0]} to {some[-1]}"
                raise RuntimeError(f"no peer published {what} within {limit_ms} ms")
            values += reply.values
        return values

    def add(self, key: str, amount: int) -> int:
        self._send_own()
        request = pb.StoreAddRequest(key=self._key(key), amount=amount, id=secrets.token_hex(16))
        return int(self._gate.result(self._stub.Add.future(request)).count)

    def check(self, keys: Sequence[str]) -> bool:
        self._send_own()
        request = pb.StoreCheckRequest(keys=[self._key(key) for key in keys])
        return bool(self._gate.result(self._stub.Check.future(request)).found)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        self._when_there(keys, self._timeout_ms if timeout is None else int(timeout.total_seconds() * 1000))

    def delete_key(self, key: str) -> bool:
        self._send_own()
        return bool(
            self._gate.result(self._stub.Delete.future(pb.StoreDeleteRequest(key=self._key(key)))).found
        )
