"""Ways to make a state durable, each behind the same three calls; the paper's are in paper_policies.py."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Self

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from training_state import (
    State,
    bytes_of,
    description_of,
    empty_state,
    memory_of,
)

from understudy.recovery.persistence import Store
from understudy.recovery.persistence._storage import Storage, raw_loop

MIB = 1 << 20
BLOCK = 4096
CLIENT_STATE, DEVICE_BUFFER = 4, 1  # kinds of extents
CHUNK = 4 * MIB
POOL = 64 * MIB
THREADS = 2
MOST_DEPTH = 32  # what a ring of the uring engine takes

DONE: Future[None] = Future()
DONE.set_result(None)


class Way(ABC):
    """One way to save a state.  Closed at the end."""

    durable = True
    """It survives the machine."""

    @abstractmethod
    def save(self, state: State) -> Future[None]:
        """Returns as soon as the state may change again; the future ends when all of it is durable."""

    @abstractmethod
    def load(self) -> State:
        """What was saved last."""

    def dram(self, state: State) -> int | None:
        """Bytes of host memory beside the state itself and the page cache; None: must be measured."""
        return 0

    @abstractmethod
    def storage(self, state: State) -> int:
        """Bytes of storage it needs, so that something complete is there at any time."""

    def clean(self) -> None:  # noqa: B027 - most have nothing to forget
        """Forgets what was saved, if that takes storage of its own."""

    def close(self) -> None:
        self.clean()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def padded(count: int, unit: int = BLOCK) -> int:
    return -(-count // unit) * unit


def sync_directory(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def copy_into(to: State, state: State) -> None:
    for name, tensor in state.items():
        to[name].copy_(tensor)


class Raw(Way):
    """The limit: bytes that lie in memory as they are to lie on the disk, no checksums, one sync.

    What counts is `seconds`, the loop's own time: queues of asynchronous I/O take long to be given back.
    """

    def __init__(
        self,
        path: Path,
        count: int,
        chunk: int = CHUNK,
        threads: int = THREADS,
        *,
        huge_pages: bool = True,
    ) -> None:
        self.path, self.chunk, self.threads = str(path), chunk, threads
        self.depth = depth_of(chunk, threads)
        self.seconds = 0.0
        self.memory = mmap.mmap(-1, padded(count), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge_pages:
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        torch.frombuffer(self.memory, dtype=torch.uint8).random_()

    def save(self, state: State) -> Future[None]:
        self.seconds = raw_loop(self.path, True, self.memory, self.chunk, self.threads, self.depth)
        return DONE

    def load(self) -> State:
        self.seconds = raw_loop(self.path, False, self.memory, self.chunk, self.threads, self.depth)
        return {}

    def storage(self, state: State) -> int:
        return bytes_of(state)


class RawCommitted(Raw):
    """And then twice a block and its sync, as a header and a superblock: what such an order costs."""

    def save(self, state: State) -> Future[None]:
        super().save(state)
        with mmap.mmap(-1, BLOCK) as block:
            for _ in range(2):
                self.seconds += raw_loop(self.path, True, block, BLOCK, 1, 1)
        return DONE


def depth_of(chunk: int, threads: int, pool: int = POOL) -> int:
    """Blocks under way per thread when a pool is shared evenly."""
    return max(1, min(MOST_DEPTH, pool // chunk // threads))


def create_store(path: Path, state: State, slots: int, chunk: int = CHUNK) -> None:
    sizes = [len(description_of(state)), *(tensor.nbytes for tensor in state.values())]
    slot_bytes = Store.needed_slot_bytes(sizes, chunk_bytes=chunk)
    Store.create(path, slots=slots, slot_bytes=slot_bytes, chunk_bytes=chunk)


class Understudy(Way):
    """Store.persist, as a job's writer calls it: what there is to write is described once, while the tensors
    stay where they are, and older snapshots are released when it has answered.

    `copies`: into a snapshot area first, as a device server does, so that training goes on.
    """

    def __init__(
        self, store: Path, engine: str = "auto", threads: int = THREADS, copies: bool = False
    ) -> None:
        self.opened = Store.open(store, engine=engine, pool_bytes=POOL)
        self.threads, self.copies = threads, copies
        self.serial = max((entry.serial for entry in self.opened.snapshots()), default=0)
        self.counting = Lock()
        self.area: State = {}
        self.described: State = {}
        self.extents: list[tuple[int, int, memoryview]] = []
        self.background = ThreadPoolExecutor(1)
        self.released = DONE

    def save(self, state: State) -> Future[None]:
        durable = DONE
        if not self.copies:
            self.persist(state)
        elif not self.area:
            self.area = {name: tensor.clone() for name, tensor in state.items()}
            durable = self.background.submit(self.persist, self.area)
        else:
            copy_into(self.area, state)
            durable = self.background.submit(self.persist, self.area)
        self.released = self.background.submit(self.release)
        return durable

    def persist(self, state: State) -> None:
        with self.counting:
            self.serial += 1
            serial = self.serial
            extents = self.described_as_extents(state)
        self.opened.persist(
            job="bench", rank=0, world=1, step=serial, serial=serial, extents=extents,
            threads=self.threads, timeout_s=60,
        )  # fmt: skip

    def described_as_extents(self, state: State) -> list[tuple[int, int, memoryview]]:
        if self.described is not state:
            tensors = [(DEVICE_BUFFER, i, memory_of(tensor)) for i, tensor in enumerate(state.values())]
            self.extents = [(CLIENT_STATE, 0, memoryview(description_of(state))), *tensors]
            self.described = state
        return self.extents

    def release(self) -> None:
        """All but the newest go, as when proxyd has heard that all ranks have it."""
        self.opened.release_before(self.serial)

    def settle(self) -> None:
        """Until the last save's release is over."""
        self.released.result()

    def newest(self) -> int:
        return self.opened.snapshots()[0].sequence

    def load(self) -> State:
        sequence = self.newest()
        description = bytearray(self.opened.extents(sequence)[0][2])
        self.opened.read(sequence, 0, description)
        state = empty_state(bytes(description))
        self.fill(state)
        return state

    def fill(self, state: State) -> None:
        """Reads and checks all of the newest snapshot into tensors that are there."""
        sequence = self.newest()
        description = bytearray(self.opened.extents(sequence)[0][2])
        self.opened.read_all(sequence, [description, *(memory_of(tensor) for tensor in state.values())])

    def fill_one_by_one(self, state: State) -> None:
        sequence = self.newest()
        for index, tensor in enumerate(state.values(), start=1):
            self.opened.read(sequence, index, memory_of(tensor))

    def check(self) -> None:
        """Reads everything and copies nothing."""
        assert not self.opened.verify(self.newest())

    def dram(self, state: State) -> int:
        return POOL + (bytes_of(state) if self.copies else 0)

    def storage(self, state: State) -> int:
        return self.opened.capacity * self.opened.slot_bytes

    def close(self) -> None:
        self.background.shutdown()
        self.opened.close()


class TorchSave(Way):
    """torch.save beside the old file, flushed, put in its place, durably."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def save(self, state: State) -> Future[None]:
        self.write(state)
        return DONE

    def write(self, state: State) -> None:
        with open(self.folder / "new", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.folder / "new", self.folder / "state")
        sync_directory(self.folder)

    def load(self) -> State:
        loaded: State = torch.load(self.folder / "state")
        return loaded

    def dram(self, state: State) -> int | None:
        return None

    def storage(self, state: State) -> int:
        return 2 * bytes_of(state)

    def clean(self) -> None:
        for file in self.folder.iterdir():
            file.unlink()


class Distributed(Way):
    """torch.distributed.checkpoint with sync_files; `by` a thread or a process: async_save.

    A folder for each save, as for steps; PyTorch's writer syncs its files, and no folder.
    """

    def __init__(self, folder: Path, by: AsyncCheckpointerType | None = None) -> None:
        self.folder, self.by = folder, by
        self.description = b""
        self.number = 0
        folder.mkdir()

    def save(self, state: State) -> Future[None]:
        self.number += 1
        writer = dcp.FileSystemWriter(self.folder / str(self.number), sync_files=True)
        self.description = description_of(state)
        if self.by is None:
            dcp.save(state, storage_writer=writer, no_dist=True)
            return DONE
        future = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=self.by, no_dist=True)
        assert isinstance(future, Future)
        return future

    def load(self) -> State:
        state = empty_state(self.description)
        self.fill(state)
        return state

    def fill(self, state: State) -> None:
        dcp.load(state, storage_reader=dcp.FileSystemReader(self.folder / str(self.number)), no_dist=True)

    def dram(self, state: State) -> int | None:
        # By a thread: PyTorch's stager clones the state.  Memory that is used again shows in no peak.
        return bytes_of(state) if self.by is AsyncCheckpointerType.THREAD else None

    def storage(self, state: State) -> int:
        return 2 * bytes_of(state)

    def clean(self) -> None:
        for folder in self.folder.iterdir():
            shutil.rmtree(folder)


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A process group of one, which PyTorch's process for async_save needs; what that one logs is dropped."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
        dist.destroy_process_group()


def engines_there(path: Path) -> tuple[list[str], dict[str, str]]:
    """Engines that work on a file, and why the others do not."""
    found, reasons = [], {}
    for kind in ("uring", "direct", "buffered", "mmap", "dax"):
        try:
            with contextlib.closing(Storage(str(path), kind)):
                found.append(kind)
        except OSError as error:
            reasons[kind] = str(error)
    return found, reasons
