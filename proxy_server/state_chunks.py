"""State in chunks, as it goes to another host: what the holder makes of it, and what the receiver accepts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from understudy.protos import control_pb2 as pb
from understudy.proxy_server.state_copy import CHUNK_BYTES, State, Wanted
from understudy.replay import digest


class NotAsAsked(RuntimeError):
    """What came is refused; its text says why, after a colon."""


@dataclass(frozen=True)
class Piece:
    """Of a buffer."""

    buffer: Wanted
    offset: int
    bytes: int


def chunks_of(state: State, wanted: pb.StateRange) -> Iterator[pb.ReplicaStateChunk]:
    """In order.  Raises ValueError or RuntimeError: what the executor refuses."""
    if not state.has_content(wanted.handle):
        yield pb.ReplicaStateChunk(handle=wanted.handle, no_content=True)
        return
    end = wanted.offset + wanted.bytes
    if end > state.buffer_bytes(wanted.handle):
        raise ValueError(f"buffer {wanted.handle} is not that large")
    for offset in range(wanted.offset, end, CHUNK_BYTES):
        data = state.read_state(wanted.handle, offset, min(CHUNK_BYTES, end - offset))
        yield pb.ReplicaStateChunk(handle=wanted.handle, offset=offset, data=data, checksum=digest(data))


def take(
    chunks: Iterator[pb.ReplicaStateChunk], pieces: Sequence[Piece], state: State,
    lost: Callable[[Wanted], None],
) -> int:  # fmt: skip
    """Copy these into `state`; answers the bytes, and tells `lost` of buffers whose content is not there.

    Raises NotAsAsked: each chunk must be the next one, and be as it was.
    """
    copied = 0
    for piece in pieces:
        buffer, offset, end = piece.buffer, piece.offset, piece.offset + piece.bytes
        while offset < end:
            chunk = next(chunks, None)
            if chunk is None:
                raise NotAsAsked("it ends too soon")
            if chunk.handle != buffer.source_handle:
                raise NotAsAsked("it is not what was asked for")
            if chunk.no_content:
                lost(buffer)
                break
            count = len(chunk.data)
            if chunk.offset != offset or not 0 < count <= end - offset:
                raise NotAsAsked("it is not what was asked for")
            if digest(chunk.data) != chunk.checksum:
                raise NotAsAsked("it was damaged on its way")
            for handle in buffer.handles:
                state.adopt_replica(handle, offset, chunk.data)
            offset += count
            copied += count * len(buffer.handles)
    return copied
