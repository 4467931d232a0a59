"""State of a replica on another host: over TLS in messages, several streams at once so that the link is full.

Who asks shows a certificate of the cluster and the job's token, and names rank and generation.  What comes is
as untrusted as any message: each chunk must be the next of what was asked for, and has a checksum; digests of
the commit are compared behind it, as always.
"""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import grpc

from understudy.protos import control_pb2 as pb
from understudy.protos import services as rpc
from understudy.protos.lasting_channels import LASTING
from understudy.proxy_server.host_identity import HostIdentity
from understudy.proxy_server.state_chunks import NotAsAsked, Piece, chunks_of, take
from understudy.proxy_server.state_copy import CHUNK_BYTES, COPY_S, State, Wanted

STREAMS = max(1, min(4, len(os.sched_getaffinity(0)) // 2))
"""At once, each with a connection of its own: a stream keeps a core busy at either end."""
BATCH_BYTES = 16 << 20
"""Asked for at once, by a stream."""
MOST_RANGES = 4096
PREFIX = "tls:"
OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", 4 * CHUNK_BYTES),
    ("grpc.max_send_message_length", 4 * CHUNK_BYTES),
    *LASTING,
]
SERVER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", 1 << 20),
    ("grpc.max_send_message_length", 4 * CHUNK_BYTES),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 2000),
    ("grpc.so_reuseport", 0),
]
MOST_READERS = 16


class StateNotFetched(RuntimeError):
    """Why, in a sentence."""


# ------------------------------------------------------------------ whose state it is
class ReplicaStateService(rpc.ReplicaStateServicer):
    """Of one device server."""

    def __init__(self, refusal: Callable[[pb.ReplicaStateRequest], str], state: State) -> None:
        """`refusal`: why a request is refused; empty if it is not."""
        self._refusal = refusal
        self._state = state

    def ReadState(
        self, request: pb.ReplicaStateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.ReplicaStateChunk]:
        if why := self._refusal(request):
            context.abort(grpc.StatusCode.PERMISSION_DENIED, why)
        if len(request.ranges) > MOST_RANGES:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"more than {MOST_RANGES} ranges are asked for")
        try:
            for wanted in request.ranges:
                yield from chunks_of(self._state, wanted)
        except (RuntimeError, ValueError) as problem:  # as the executor refuses what is not there
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(problem))


def serve_state(
    service: ReplicaStateService, address: str, identity: HostIdentity
) -> tuple[grpc.Server, str]:
    """At a free port of that IP address; answers where.  Raises OSError."""
    server = grpc.server(
        futures.ThreadPoolExecutor(MOST_READERS), options=SERVER_OPTIONS,
        maximum_concurrent_rpcs=MOST_READERS,
    )  # fmt: skip
    rpc.add_ReplicaStateServicer_to_server(service, server)
    place = f"[{address}]" if ":" in address else address
    try:
        port = server.add_secure_port(f"{place}:0", identity.of_server())
    except RuntimeError as problem:
        raise OSError(f"cannot listen at {place}: {problem}") from problem
    server.start()
    return server, f"{place}:{port}"


# ------------------------------------------------------------------ who needs it
@dataclass(frozen=True)
class Asker:
    """In whose name state is read."""

    job: str
    generation: int
    token: bytes


class RemoteReplica:
    """A device server of another host, as `tls:HOSTNAME@IP:PORT` names it."""

    def __init__(self, address: str, rank: int, identity: HostIdentity | None, asker: Asker) -> None:
        """Raises StateNotFetched."""
        match = re.fullmatch(
            r"tls:([A-Za-z0-9][A-Za-z0-9._-]{0,62})@((?:[0-9.]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5})", address
        )
        if match is None:
            raise StateNotFetched(f"{address[:200]!r} is no address of a device server on another host")
        if identity is None:
            raise StateNotFetched(
                f"the state of rank {rank} is on host {match[1]}, and this one has no certificate for it"
            )
        self._host, self._place = match[1], match[2]
        self._rank, self._identity, self._asker = rank, identity, asker
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._calls: set[Any] = set()

    def fetch(self, wanted: Sequence[Wanted], state: State) -> tuple[int, list[int]]:
        """Copy these into `state`; answers the bytes, and handles whose content is not there any more.

        Raises StateNotFetched.
        """
        batches = deque(_batches(wanted))
        lost: dict[int, None] = {}
        try:
            secret = self._identity.of_client()
        except OSError as problem:
            raise StateNotFetched(f"the certificates of this host cannot be read: {problem}") from problem

        def stream() -> int:
            options = [*OPTIONS, ("grpc.ssl_target_name_override", self._host)]
            copied = 0
            with grpc.secure_channel(self._place, secret, options=options) as channel:
                stub = rpc.ReplicaStateStub(channel)
                while not self._stop.is_set():
                    try:
                        batch = batches.popleft()
                    except IndexError:
                        break
                    copied += self._fetch_batch(stub, batch, state, lost)
            return copied

        with futures.ThreadPoolExecutor(STREAMS, "replica") as threads:
            streams = [threads.submit(stream) for _ in range(min(STREAMS, len(batches)))]
            done, _ = futures.wait(streams, return_when=futures.FIRST_EXCEPTION)
            if any(one.exception() is not None for one in done):
                self._break_off()
        problems = [one.exception() for one in streams if one.exception() is not None]
        if problems:
            first = next((one for one in problems if isinstance(one, StateNotFetched)), problems[0])
            assert first is not None
            raise first
        return sum(one.result() for one in streams), list(lost)

    def _fetch_batch(
        self, stub: rpc.ReplicaStateStub, batch: Sequence[Piece], state: State, lost: dict[int, None]
    ) -> int:
        asker = self._asker
        request = pb.ReplicaStateRequest(
            job=asker.job, rank=self._rank, generation=asker.generation, token=asker.token,
            ranges=[
                pb.StateRange(handle=one.buffer.source_handle, offset=one.offset, bytes=one.bytes)
                for one in batch
            ],
        )  # fmt: skip

        def gone(buffer: Wanted) -> None:
            with self._lock:
                for handle in buffer.handles:
                    state.mark_lost(handle)
                    lost[handle] = None

        call = stub.ReadState(request, timeout=COPY_S)
        with self._lock:
            self._calls.add(call)
        try:
            if self._stop.is_set():
                raise self._failed("another stream has failed")
            return take(call, batch, state, gone)
        except NotAsAsked as problem:
            raise self._failed(str(problem)) from problem
        except grpc.RpcError as problem:
            raise self._failed(str(problem.details()).splitlines()[0][:300]) from problem
        finally:
            call.cancel()
            with self._lock:
                self._calls.discard(call)

    def _failed(self, why: str) -> StateNotFetched:
        return StateNotFetched(
            f"the state of rank {self._rank} could not be had from host {self._host} at {self._place}: {why}"
        )

    def _break_off(self) -> None:
        self._stop.set()
        with self._lock:
            for call in self._calls:
                call.cancel()


def _batches(wanted: Sequence[Wanted]) -> Iterator[list[Piece]]:
    """Of about BATCH_BYTES each: small buffers together, large ones in pieces."""
    batch: list[Piece] = []
    room = BATCH_BYTES
    for buffer in wanted:
        offset = 0
        while offset < buffer.bytes:
            count = min(room, buffer.bytes - offset)
            batch.append(Piece(buffer, offset, count))
            offset, room = offset + count, room - count
            if room == 0 or len(batch) == MOST_RANGES:
                yield batch
                batch, room = [], BATCH_BYTES
    if batch:
        yield batch
