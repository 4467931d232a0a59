"""The policies that PCcheck is compared with (section 2.2), and its own (section 4), on one host.

What they share is here once: a file that is mapped and has slots, a pointer to the one that counts, and a
copy of the state in host memory.  They keep what makes each of them what it is: what stalls, what is copied,
how many are under way, and when something counts.
"""

from __future__ import annotations

import os
import queue
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import peer_memory
import torch
from persist_ways import BLOCK, DONE, MIB, THREADS, TorchSave, Way, copy_into, padded
from training_state import State, bytes_of, description_of, empty_state, memory_of, offsets_of

from understudy.recovery.snapshots._storage import Storage

POINTER = struct.Struct("<QQ")  # number of the snapshot, offset of its slot: CHECK_ADDR of Listing 1
LENGTH = struct.Struct("<Q")
CHUNKS = 4
"""In how many pieces PCcheck copies to host memory; section 5.4.3 finds little difference."""


def slot_bytes_for(state: State) -> int:
    return padded(offsets_of(state, first_of(description_of(state)))[-1])


def first_of(description: bytes) -> int:
    return padded(LENGTH.size + len(description))


class CheckFreq(TorchSave):
    """Copied to host memory while training stalls; torch.save in the background; one at a time."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.background = ThreadPoolExecutor(1)
        self.under_way: Future[None] = DONE
        self.copy: State = {}

    def save(self, state: State) -> Future[None]:
        self.under_way.result()
        if not self.copy:
            self.copy = {name: tensor.clone() for name, tensor in state.items()}
        else:
            copy_into(self.copy, state)
        self.under_way = self.background.submit(self.write, self.copy)
        return self.under_way

    def dram(self, state: State) -> int:
        return bytes_of(state)

    def close(self) -> None:
        self.background.shutdown()
        super().close()


class MappedSlots:
    """A mapped file: a page for the pointer, then slots, each with a description and tensors."""

    def __init__(self, path: Path, slots: int, slot_bytes: int) -> None:
        self.storage = Storage(str(path), "mmap")
        self.path, self.slots, self.slot_bytes = path, slots, slot_bytes
        self.free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(slots):
            self.free.put(BLOCK + slot * slot_bytes)
        self.number = 0
        self.counts: tuple[int, int] | None = None
        self.lock = threading.Lock()

    def begin(self) -> tuple[int, int]:
        """A number and a slot for the next snapshot; waits for a slot."""
        with self.lock:
            self.number += 1
            number = self.number
        return number, self.free.get()

    def put(self, offset: int, content: memoryview) -> None:
        writer = self.storage.writer()
        writer.submit(offset, content, 0)
        writer.wait()

    def describe(self, slot: int, state: State) -> list[int]:
        """Where the tensors of a state go in that slot."""
        description = description_of(state)
        self.put(slot, memoryview(LENGTH.pack(len(description)) + description))
        return offsets_of(state, slot + first_of(description))

    def commit(self, number: int, slot: int) -> None:
        """One msync for the slot, then the pointer, unless a newer one counts already (lines 16 to 34)."""
        self.storage.sync_range(slot, self.slot_bytes)
        with self.lock:
            if self.counts is not None and self.counts[0] > number:
                return self.free.put(slot)
            self.put(0, memoryview(POINTER.pack(number, slot)))
            self.storage.sync_range(0, BLOCK)
            if self.counts is not None:
                self.free.put(self.counts[1])
            self.counts = number, slot

    def load(self) -> State:
        with open(self.path, "rb") as file:
            _, slot = POINTER.unpack(file.read(POINTER.size))
            file.seek(slot)
            description = file.read(LENGTH.unpack(file.read(LENGTH.size))[0])
            state = empty_state(description)
            for tensor, offset in zip(
                state.values(), offsets_of(state, slot + first_of(description)), strict=False
            ):
                file.seek(offset)
                file.readinto(memory_of(tensor))
        return state

    def close(self) -> None:
        self.storage.close()


class Gpm(Way):
    """Training stalls while the state is stored straight into a mapped file, which is synced; no copy."""

    def __init__(self, path: Path, state: State) -> None:
        self.file = MappedSlots(path, 2, slot_bytes_for(state))

    def save(self, state: State) -> Future[None]:
        number, slot = self.file.begin()
        for tensor, offset in zip(state.values(), self.file.describe(slot, state), strict=False):
            self.file.put(offset, memory_of(tensor))
        self.file.commit(number, slot)
        return DONE

    def load(self) -> State:
        return self.file.load()

    def storage(self, state: State) -> int:
        return BLOCK + self.file.slots * self.file.slot_bytes

    def close(self) -> None:
        self.file.close()


class PcCheck(Gpm):
    """Copied to host memory in pieces, each of which threads store into a mapped file; N under way."""

    def __init__(self, path: Path, state: State, in_flight: int = 2, threads: int = THREADS) -> None:
        self.file = MappedSlots(path, in_flight + 1, slot_bytes_for(state))
        self.threads = threads
        self.copies: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self.count = self.file.slot_bytes
        self.in_flight = in_flight
        for _ in range(in_flight):  # DRAM of N * m; the paper's own runs have 2 m
            self.copies.put(torch.zeros(self.count, dtype=torch.uint8))
        self.background = ThreadPoolExecutor(in_flight)

    def save(self, state: State) -> Future[None]:
        copy = self.copies.get()
        number, slot = self.file.begin()
        offsets = self.file.describe(slot, state)
        pieces: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        ended = self.background.submit(self.persist, number, slot, copy, pieces)
        begin, least = offsets[0], (offsets[-1] - offsets[0]) // CHUNKS
        for tensor, offset, end in zip(state.values(), offsets, offsets[1:], strict=False):
            place = copy[offset - slot : offset - slot + tensor.nbytes]
            place.copy_(tensor.reshape(-1).view(torch.uint8))
            if end - begin >= least:
                pieces.put((begin, end))
                begin = end
        pieces.put((begin, offsets[-1]))
        pieces.put(None)
        return ended

    def persist(
        self, number: int, slot: int, copy: torch.Tensor, pieces: queue.SimpleQueue[tuple[int, int] | None]
    ) -> None:
        while (piece := pieces.get()) is not None:
            begin, end = piece
            if end > begin:
                part = -(-(end - begin) // self.threads)
                content = memory_of(copy)[begin - slot : end - slot]
                self.file.storage.write(begin, content, padded(part), self.threads)
        self.file.commit(number, slot)
        self.copies.put(copy)

    def dram(self, state: State) -> int:
        return self.in_flight * self.count

    def close(self) -> None:
        self.background.shutdown()
        super().close()


class Gemini(Way):
    """Sent to the memory of another process over a Unix socket pair; one at a time.  Not durable."""

    durable = False

    def __init__(self, state: State) -> None:
        self.most, self.description = bytes_of(state), description_of(state)
        self.socket, other = socket.socketpair()
        for end in (self.socket, other):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                end.setsockopt(socket.SOL_SOCKET, option, 4 * MIB)
        command = [sys.executable, peer_memory.__file__, str(other.fileno()), str(self.most)]
        self.peer = subprocess.Popen(command, pass_fds=[other.fileno()])
        other.close()

    def save(self, state: State) -> Future[None]:
        self.socket.sendall(peer_memory.REQUEST.pack(b"S", bytes_of(state)))
        for tensor in state.values():  # none is copied on this side: the state must not change until the end
            self.socket.sendall(memory_of(tensor))
        if not peer_memory.receive(self.socket, memoryview(bytearray(1))):
            raise OSError("the peer is gone")
        return DONE

    def load(self) -> State:
        self.socket.sendall(peer_memory.REQUEST.pack(b"L", 0))
        state = empty_state(self.description)
        peer_memory.receive(self.socket, memoryview(bytearray(LENGTH.size)))
        for tensor in state.values():
            peer_memory.receive(self.socket, memory_of(tensor))
        return state

    def dram(self, state: State) -> int:
        return 2 * self.most

    def storage(self, state: State) -> int:
        return 0

    def close(self) -> None:
        self.socket.close()
        self.peer.wait()


def prepare(path: Path, count: int) -> None:
    """A file of `count` bytes whose blocks have all been written once."""
    block = os.urandom(MIB)
    with open(path, "wb") as file:
        for _ in range(-(-count // MIB)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
