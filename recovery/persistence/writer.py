"""A job's writer: copies snapshots from host memory into stores, for as long as proxyd lives.

    python -m recovery.persistence.writer DIRECTORY --job JOB --slots N --threads P --parent PID

A process of its own: what it reads belongs to workers, and a disk that hangs must not hold up proxyd.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import replay
from recovery.persistence import _store
from recovery.persistence.kinds import BUFFER, CLIENT_STATE, CONTENT, ELSEWHERE, GENERATOR, MANIFEST, ROW
from recovery.persistence.layout import RUN_NAME, store_path, stores_of
from recovery.persistence.parts import Holding, Part, split
from recovery.persistence.request import Discard, Persist, Release, Request, Written, decode_request, encode

LARGEST_DESCRIPTION = 256 << 20
"""Bytes; a million tensors take about as many."""
SLACK = 1.25
"""A slot has room for a snapshot that is larger than the first by this factor."""
SLOT_FREE_S = 60.0
"""How long a snapshot waits for a slot: until others are complete on all ranks."""

_PR_SET_PDEATHSIG = 1

Extents = list[tuple[int, int, bytes | memoryview]]


@dataclass(frozen=True)
class Source:
    """A rank's snapshot in host memory."""

    rank: int
    log: replay.Log
    contents: replay.SnapshotContents
    area: memoryview
    described: bytes
    """What the worker says of it, if it did (proxy_client/state_names.py)."""

    def extents(self, part: Part) -> Extents:
        """What is to be written of it."""
        contents, area = self.contents, self.area
        place = {handle: (offset, count) for handle, count, _, offset in contents.buffers}
        table = {handle: [holder.rank, holder.handle] for handle, holder in part.elsewhere.items()}
        extents: Extents = [
            (MANIFEST, ROW, contents.row),
            (MANIFEST, CONTENT, contents.manifest),
            (ELSEWHERE, 0, json.dumps(table).encode()),
        ]
        if self.described:
            extents.append((CLIENT_STATE, 0, self.described))
        for number, count, _, offset in contents.generators:
            extents.append((GENERATOR, number, area[offset : offset + count]))
        for buffer in part.own:
            offset, count = place[buffer.handle]
            extents.append((BUFFER, buffer.handle, area[offset : offset + count]))
        return extents


class RankStores:
    """A rank's stores of one run: the newest is written, older ones were too small."""

    def __init__(self, run: Path, rank: int, slots: int, agreed: bool) -> None:
        self._run, self._rank, self._slots, self._agreed = run, rank, slots, agreed
        self._lock = threading.Lock()
        self._growth = -1
        self._current: _store.Store | None = None
        self._outgrown: dict[Path, tuple[int, _store.Store | None]] = {}
        """Stores whose snapshots are needed until this serial is complete; open ones may still be written."""

    def fitting(self, sizes: Sequence[int], serial: int) -> _store.Store:
        """A store with room for extents of these sizes; raises OSError or StoreError."""
        with self._lock:
            if self._growth < 0:
                self._find()
            needed = _store.Store.needed_slot_bytes(sizes)
            if self._current is None or self._current.slot_bytes < needed:
                self._grow(round(needed * SLACK), serial)
            assert self._current is not None
            return self._current

    def release(self, serial: int) -> None:
        """It is complete on all ranks."""
        with self._lock:
            if self._current is not None:
                self._current.release_before(serial)
            for path in [path for path, (until, _) in self._outgrown.items() if until <= serial]:
                _, store = self._outgrown.pop(path)
                path.unlink(missing_ok=True)
                if store is not None:
                    store.close()  # only then its blocks are free

    def discard(self, serial: int) -> None:
        """It will never be complete."""
        with self._lock:
            if self._current is not None:
                self._current.discard(serial)

    def _find(self) -> None:
        """What another writer of the same run has left."""
        self._run.mkdir(mode=0o700, parents=True, exist_ok=True)
        known = [store for store in stores_of(self._run) if store.rank == self._rank]
        self._growth = max((store.growth for store in known), default=0)
        for store in known:
            if store.growth == self._growth:
                try:
                    self._current = _store.Store.open(str(store.path), agreed=self._agreed)
                    continue
                except _store.StoreError as problem:  # damaged, or its writer has not quite ended
                    sys.stderr.write(f"understudy: a new store is begun: {problem}\n")
            self._outgrown[store.path] = (0, None)  # until the next one is complete
        if known and self._current is None:
            self._growth += 1

    def _grow(self, slot_bytes: int, serial: int) -> None:
        if self._current is not None:
            self._outgrown[store_path(self._run, self._rank, self._growth)] = (serial, self._current)
            self._growth += 1
        path = store_path(self._run, self._rank, self._growth)
        half_made = path.with_suffix(".new")
        half_made.unlink(missing_ok=True)
        try:
            _store.Store.create(str(half_made), slots=self._slots, slot_bytes=slot_bytes)
            half_made.rename(path)
        except OSError:
            half_made.unlink(missing_ok=True)
            raise
        self._current = _store.Store.open(str(path), agreed=self._agreed)


class JobWriter:
    """Of one job's ranks on this host."""

    def __init__(self, directory: Path, job: str, slots: int, threads: int) -> None:
        self._directory, self._job, self._slots, self._threads = directory, job, slots, threads
        self._stores: dict[tuple[str, int], RankStores] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max_workers=64)
        self._answering = threading.Lock()

    def take(self, request: Request) -> None:
        """Begin it; the answers come when it is done."""
        if isinstance(request, Persist):
            self._pool.submit(self._persist_all, request)
        else:
            self._pool.submit(self._tell_stores, request)

    def _tell_stores(self, request: Release | Discard) -> None:
        with self._lock:
            concerned = [stores for (run, _), stores in self._stores.items() if run == request.run]
        for stores in concerned:
            try:
                if isinstance(request, Release):
                    stores.release(request.serial)
                else:
                    stores.discard(request.serial)
            except (OSError, _store.StoreError) as problem:
                sys.stderr.write(f"understudy: slots of snapshots were not freed: {problem}\n")

    def _persist_all(self, request: Persist) -> None:
        ranks = range(len(request.directories))
        try:
            if not RUN_NAME.fullmatch(request.run):
                raise ValueError(f"{request.run!r} is no name for a run")
            sources = [read_source(rank, Path(request.directories[rank]), request.serial) for rank in ranks]
            parts = split({source.rank: holdings(source.contents) for source in sources})
        except Exception as problem:  # noqa: BLE001 - as below
            for rank in ranks:
                self._answer(Written(request.serial, rank, error=str(problem) or repr(problem)))
            return
        for source in sources:
            stores = self._stores_of(request.run, source.rank, agreed=len(sources) > 1)
            self._pool.submit(self._persist, request, source, parts[source.rank], stores)

    def _stores_of(self, run: str, rank: int, agreed: bool) -> RankStores:
        with self._lock:
            if (run, rank) not in self._stores:
                folder = self._directory / self._job / run
                self._stores[run, rank] = RankStores(folder, rank, self._slots, agreed)
            return self._stores[run, rank]

    def _persist(self, request: Persist, source: Source, part: Part, stores: RankStores) -> None:
        step = source.contents.commit.step
        try:
            extents = source.extents(part)
            store = stores.fitting([memoryview(content).nbytes for _, _, content in extents], request.serial)
            receipt = store.persist(
                job=self._job, rank=source.rank, world=len(request.directories), step=step,
                serial=request.serial, extents=extents, threads=self._threads, timeout_s=SLOT_FREE_S,
                confirm=lambda: source.log.snapshot_holds(request.serial),
            )  # fmt: skip
        except Exception as problem:  # noqa: BLE001 - proxyd waits for an answer, and holds memory until then
            self._answer(Written(request.serial, source.rank, step, error=str(problem) or repr(problem)))
        else:
            self._answer(Written(request.serial, source.rank, step, receipt.bytes, receipt.seconds))

    def _answer(self, written: Written) -> None:
        with self._answering:
            sys.stdout.buffer.write(encode(written))
            sys.stdout.buffer.flush()


def read_source(rank: int, directory: Path, serial: int) -> Source:
    """A published snapshot of a rank; raises OSError or LogError."""
    log = replay.Log(str(directory))
    contents = log.snapshot_contents(serial)
    with open(directory / "snapshot", "rb") as file:
        area = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    return Source(rank, log, contents, area, read_description(directory / f"client-{serial}"))


def read_description(path: Path) -> bytes:
    """Empty if there is none, or if it is no file of ours."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    with open(descriptor, "rb") as file:
        content = file.read(LARGEST_DESCRIPTION + 1)
    return content if len(content) <= LARGEST_DESCRIPTION else b""


def holdings(contents: replay.SnapshotContents) -> list[Holding]:
    """Buffers of a snapshot by content."""
    return [Holding(handle, count, digest) for handle, count, digest, _ in contents.buffers]


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="understudy-writer")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--job", required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    given = parser.parse_args()
    die_with_parent(given.parent)
    writer = JobWriter(given.directory, given.job, given.slots, given.threads)
    for line in sys.stdin.buffer:
        writer.take(decode_request(line))
    os._exit(0)  # what is under way is cut short, which stores survive


if __name__ == "__main__":
    raise SystemExit(main())
