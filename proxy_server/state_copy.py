"""State on its way from a replica's device server to a new one of the same host.

In host memory the receiver reads it where it lies (process_vm_readv), if the kernel permits that.  Else the
sender writes one piece after another into a window of the receiver's, and the receiver takes it from there;
several pieces are under way at once, so both work at the same time.  gRPC comes last: it copies several times
over what it carries, and a message for each of many small buffers takes longer than their bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc

from understudy.protos import control_pb2 as pb
from understudy.protos import services as rpc

PIECE_BYTES = 2 << 20
MOST_PARTS = 1024
"""In one piece, of as many buffers."""
PIECES = 3
"""Under way at once: more would be memory that both map anew, and seldom in a cache."""
WINDOW_BYTES = PIECE_BYTES * PIECES
CHUNK_BYTES = 1 << 20
"""Of state in one message: so much stays in caches while gRPC copies it about."""
NO_CONTENT = 2**64 - 1
"""Offset of a chunk that says: this buffer's content was not kept here."""
COPY_S = 600.0
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class WindowUnusable(RuntimeError):
    """The sender cannot write into the receiver's memory; messages can carry the state as well."""


class NotReadable(RuntimeError):
    """The receiver cannot read the sender's memory by itself; there are other ways."""


class State(Protocol):
    """What the executor can do with the state of its rank while it is parked."""

    def locate(self) -> Sequence[tuple[int, int, int]] | None: ...
    def read_from_process(self, pid: int, places: Sequence[tuple[int, int]]) -> bool: ...
    def has_content(self, handle: int) -> bool: ...
    def buffer_bytes(self, handle: int) -> int: ...
    def read_state(self, handle: int, offset: int, count: int) -> bytes: ...
    def read_state_into(self, handle: int, offset: int, count: int, memory: mmap.mmap, at: int) -> None: ...
    def adopt_replica(self, handle: int, offset: int, data: memoryview | bytes) -> None: ...
    def mark_lost(self, handle: int) -> None: ...


@dataclass(frozen=True)
class Wanted:
    """A buffer of the sender's, and those of the receiver's that it fills."""

    source_handle: int
    bytes: int
    handles: Sequence[int]


@dataclass(frozen=True)
class Part:
    """Of a buffer: so many bytes behind an offset."""

    buffer: Wanted
    offset: int
    bytes: int


def pieces_of(wanted: Iterable[Wanted]) -> Iterator[list[Part]]:
    """Parts of all buffers, in their order, together at most PIECE_BYTES and MOST_PARTS."""
    piece: list[Part] = []
    room = PIECE_BYTES
    for buffer in wanted:
        offset, asked = 0, False
        while offset < buffer.bytes or not asked:  # an empty one may be lost as well
            if room == 0 or len(piece) == MOST_PARTS:
                yield piece
                piece, room = [], PIECE_BYTES
            count = min(room, buffer.bytes - offset)
            piece.append(Part(buffer, offset, count))
            offset, room, asked = offset + count, room - count, True
    if piece:
        yield piece


class Sender:
    """The sender's side.  The window in use stays mapped: another one comes with another recovery."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: tuple[tuple[int, int, int], mmap.mmap] | None = None

    def copy(self, request: pb.CopyStateRequest, state: State) -> pb.CopyStateReply:
        """Write what is asked for where it is wanted."""
        at = request.window_offset
        try:
            memory = self._window(request.window)
        except (OSError, ValueError) as problem:
            return pb.CopyStateReply(error=str(problem), no_window=True)
        gone = []
        for part in request.parts:
            if state.has_content(part.handle):
                state.read_state_into(part.handle, part.offset, part.bytes, memory, at)
            else:
                gone.append(part.handle)
            at += part.bytes
        return pb.CopyStateReply(no_content=gone)

    def messages(self, handles: Sequence[int], state: State) -> Iterator[pb.StateChunk]:
        """The same where there is no window."""
        for handle in handles:
            if not state.has_content(handle):
                yield pb.StateChunk(handle=handle, offset=NO_CONTENT)
                continue
            total = state.buffer_bytes(handle)
            for offset in range(0, total, CHUNK_BYTES):
                data = state.read_state(handle, offset, min(CHUNK_BYTES, total - offset))
                yield pb.StateChunk(handle=handle, offset=offset, data=data)

    def forget(self) -> None:
        """Let go of the window."""
        with self._lock:
            self._known = None  # unmapped when the last copy into it has ended

    def _window(self, window: pb.Window) -> mmap.mmap:
        """Raises OSError or ValueError."""
        file = os.open(f"/proc/{window.pid}/fd/{window.file}", os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(file)
            name = (status.st_dev, status.st_ino, status.st_size)
            with self._lock:
                if self._known is not None and self._known[0] == name:
                    return self._known[1]
            if status.st_ino != window.inode or status.st_uid != os.geteuid():
                raise ValueError("the window is no memory of the receiver's any more")
            if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError("the window might shrink")  # and end whoever writes into it
            memory = mmap.mmap(file, status.st_size)
        finally:
            os.close(file)
        with self._lock:
            self._known = (name, memory)
        return memory


class Receiver:
    """The receiver's side: memory for pieces on their way.  A context; raises OSError if there is none."""

    def __init__(self) -> None:
        self._file = os.memfd_create("understudy-copy", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._file, WINDOW_BYTES)
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
            self._memory = mmap.mmap(self._file, WINDOW_BYTES)
        except OSError:
            os.close(self._file)
            raise

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.close()
        os.close(self._file)

    def fetch(
        self,
        sender: rpc.DeviceServerStub,
        wanted: Sequence[Wanted],
        state: State,
        lost: Callable[[int], None],
    ) -> int:
        """Copy these into `state`; answers the bytes, and tells `lost` of what is not there any more.

        Raises WindowUnusable before anything was copied, RuntimeError or grpc.RpcError.
        """
        under_way: deque[tuple[grpc.Future, list[Part], int]] = deque()
        window = pb.Window(pid=os.getpid(), file=self._file, inode=os.fstat(self._file).st_ino)
        free = deque(range(0, WINDOW_BYTES, PIECE_BYTES))
        gone: set[int] = set()
        copied = 0

        def finish_oldest() -> int:
            future, parts, place = under_way.popleft()
            reply = future.result()
            if reply.no_window:
                raise WindowUnusable(reply.error)
            if reply.error:
                raise RuntimeError(reply.error)
            arrived = 0
            at, absent = place, set(reply.no_content)
            with memoryview(self._memory) as memory:
                for part in parts:
                    if part.buffer.source_handle in absent:
                        forget(part.buffer)
                    else:
                        with memory[at : at + part.bytes] as content:
                            for handle in part.buffer.handles:
                                state.adopt_replica(handle, part.offset, content)
                        arrived += part.bytes * len(part.buffer.handles)
                    at += part.bytes
            free.append(place)
            return arrived

        def forget(buffer: Wanted) -> None:
            if buffer.source_handle not in gone:
                gone.add(buffer.source_handle)
                for handle in buffer.handles:
                    state.mark_lost(handle)
                    lost(handle)

        try:
            for parts in pieces_of(wanted):
                if not free:
                    copied += finish_oldest()
                place = free.popleft()
                request = pb.CopyStateRequest(
                    window=window, window_offset=place,
                    parts=[pb.StatePart(handle=one.buffer.source_handle, offset=one.offset, bytes=one.bytes)
                           for one in parts],
                )  # fmt: skip
                under_way.append((sender.CopyState.future(request, timeout=COPY_S), parts, place))
            while under_way:
                copied += finish_oldest()
        finally:
            for future, *_ in under_way:
                future.cancel()
        return copied


def memory_of(state: State, most: int = sys.maxsize) -> pb.StateMemory | None:
    """Where the receiver finds it, if it reads by itself; nothing of more than `most` buffers."""
    places = state.locate()
    if places is None or len(places) > most:
        return None
    rows = [pb.StatePlace(handle=handle, address=at, bytes=size) for handle, at, size in places]
    return pb.StateMemory(pid=os.getpid(), places=rows)


def read_where_it_lies(
    memory: pb.StateMemory, wanted: Sequence[Wanted], state: State
) -> tuple[int, list[int]]:
    """As fetch_state, while the sender stands still; raises NotReadable before anything was copied."""
    places = {place.handle: place for place in memory.places}
    there = [buffer for buffer in wanted if buffer.source_handle in places]
    for buffer in there:
        if places[buffer.source_handle].bytes != buffer.bytes:
            raise RuntimeError(f"buffer {buffer.source_handle} of a replica is not of {buffer.bytes} bytes")
    reads = [(to, places[buffer.source_handle].address) for buffer in there for to in buffer.handles]
    if not state.read_from_process(memory.pid, reads):
        raise NotReadable("the kernel does not permit it")
    lost = [to for buffer in wanted if buffer.source_handle not in places for to in buffer.handles]
    for handle in lost:
        state.mark_lost(handle)
    return sum(buffer.bytes * len(buffer.handles) for buffer in there), lost


def _memory(sender: rpc.DeviceServerStub) -> pb.StateMemory:
    """Which this process may read from here on.  Raises NotReadable, RuntimeError or grpc.RpcError."""
    reply = sender.LocateState(pb.LocateStateRequest(reader=os.getpid()), timeout=COPY_S)
    if reply.error:
        raise RuntimeError(reply.error)
    if not reply.HasField("memory"):
        raise NotReadable("it lies in a device's memory")
    return reply.memory


def fetch_state(
    sender: rpc.DeviceServerStub, wanted: Sequence[Wanted], state: State
) -> tuple[int, list[int]]:
    """Copy these into `state`; answers the bytes, and handles whose content the sender does not have.

    Raises RuntimeError or grpc.RpcError.
    """
    lost: list[int] = []
    with contextlib.suppress(NotReadable):
        return read_where_it_lies(_memory(sender), wanted, state)
    try:
        with Receiver() as receiver:
            return receiver.fetch(sender, wanted, state, lost.append), lost
    except (OSError, WindowUnusable) as problem:
        sys.stderr.write(f"understudy: state comes in messages, which takes longer: {problem}\n")
    return _fetch_in_messages(sender, wanted, state, lost.append), lost


def _fetch_in_messages(
    sender: rpc.DeviceServerStub, wanted: Sequence[Wanted], state: State, lost: Callable[[int], None]
) -> int:
    handles_of = {buffer.source_handle: buffer.handles for buffer in wanted}
    copied = 0
    for chunk in sender.ReadState(pb.ReadStateRequest(handles=list(handles_of)), timeout=COPY_S):
        for handle in handles_of[chunk.handle]:
            if chunk.offset == NO_CONTENT:
                state.mark_lost(handle)
                lost(handle)
            else:
                state.adopt_replica(handle, chunk.offset, chunk.data)
                copied += len(chunk.data)
    return copied
