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
from snapshot_area import CLIENT_STATE, SnapshotArea, slot_bytes_for
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from training_state import (
    State,
    bytes_of,
    description_of,
    empty_state,
    memory_of,
)

from understudy.recovery.snapshots import Store
from understudy.recovery.snapshots._storage import Storage, raw_loop

MIB = 1 << 20
BLOCK = 4096
DEVICE_BUFFER = 1  # kind of extent
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
    slot_bytes = slot_bytes_for(state, chunk)
    Store.create(path, slots=slots, slot_bytes=slot_bytes, chunk_bytes=chunk)


class Understudy(Way):
    """Store.persist, as a job's writer calls it: from a snapshot area that holds the state, with the digests
    that were taken there; older snapshots are released when it has answered.

    `copies`: the state changes again as soon as it was copied to that area, as a device server does; else it
    is there already.
    """

    def __init__(
        self,
        store: Path,
        engine: str = "auto",
        threads: int = THREADS,
        copies: bool = False,
        area: SnapshotArea | None = None,
    ) -> None:
        self.opened = Store.open(store, engine=engine, pool_bytes=POOL)
        self.threads, self.copies = threads, copies
        self.serial = max((entry.serial for entry in self.opened.snapshots()), default=0)
        self.counting = Lock()
        self.area = area
        self.background = ThreadPoolExecutor(1)
        self.released = DONE

    def save(self, state: State) -> Future[None]:
        durable = DONE
        if self.area is None:
            self.area = SnapshotArea(state)
        elif self.copies or self.area.taken is not state:
            self.area.take(state)
        if self.copies:
            durable = self.background.submit(self.persist, self.area)
        else:
            self.persist(self.area)
        self.released = self.background.submit(self.release)
        return durable

    def persist(self, area: SnapshotArea) -> None:
        with self.counting:
            self.serial += 1
            serial = self.serial
        self.opened.persist(
            job="bench", rank=0, world=1, step=serial, serial=serial, extents=area.contents(),
            threads=self.threads, timeout_s=60,
        )  # fmt: skip

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
        rows = self.opened.extents(sequence)
        index = next(i for i, (kind, _, _) in enumerate(rows) if kind == CLIENT_STATE)
        description = bytearray(rows[index][2])
        self.opened.read(sequence, index, description)
        state = empty_state(bytes(description))
        self.fill(state)
        return state

    def fill(self, state: State) -> None:
        """Reads and checks all of the newest snapshot into tensors that are there."""
        sequence, tensors = self.newest(), list(state.values())
        self.opened.read_all(
            sequence,
            [
                memory_of(tensors[number]) if kind == DEVICE_BUFFER else bytearray(count)
                for kind, number, count in self.opened.extents(sequence)
            ],
        )

    def fill_area(self, area: SnapshotArea) -> None:
        """The same, straight into a snapshot area, as after a loss of all servers."""
        sequence = self.newest()
        rows = enumerate(self.opened.extents(sequence))
        wanted = [(index, area.offsets[number]) for index, (kind, number, _) in rows if kind == DEVICE_BUFFER]
        self.opened.read_into(sequence, wanted, area.memory, in_place=area.in_place)

    def fill_one_by_one(self, state: State) -> None:
        sequence, tensors = self.newest(), list(state.values())
        for index, (kind, number, _) in enumerate(self.opened.extents(sequence)):
            if kind == DEVICE_BUFFER:
                self.opened.read(sequence, index, memory_of(tensors[number]))

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
