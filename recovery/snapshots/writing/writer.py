"""A job's writer: copies snapshots from host memory into stores, for as long as proxyd lives.

    python -m understudy.recovery.snapshots.writing.writer DIRECTORY --job JOB --slots N --threads P
      --chunk BYTES --pool BYTES
        --parent PID

A process of its own: what it reads belongs to workers, and a disk that hangs must not hold up proxyd.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from understudy import replay
from understudy.recovery.snapshots import _store
from understudy.recovery.snapshots.settings import Writing
from understudy.recovery.snapshots.stores.kinds import (
    CLIENT_STATE,
    CONTENT,
    MANIFEST,
    OTHER_HOLDERS,
    ROW,
)
from understudy.recovery.snapshots.stores.layout import RUN_NAME, in_use, store_path, stores_of
from understudy.recovery.snapshots.stores.old_runs import remove_old_runs
from understudy.recovery.snapshots.stores.parts import Holding, Part, split
from understudy.recovery.snapshots.writing.mapped import MappedAreas, in_place
from understudy.recovery.snapshots.writing.request import (
    Discard,
    Persist,
    Release,
    Request,
    Written,
    decode_request,
)

LARGEST_DESCRIPTION = 256 << 20
"""Bytes; a million tensors take about as many."""
SLACK = 1.25
"""A slot has room for a snapshot that is larger than the first by this factor."""
SLOT_FREE_S = 60.0
"""How long a snapshot waits for a slot: until others are complete on all ranks."""

DEFAULT_WRITING = Writing()


@dataclass(frozen=True)
class Source:
    """A rank's snapshot in host memory."""

    rank: int
    log: replay.Log
    contents: replay.SnapshotContents
    area: memoryview
    described: bytes
    """What the worker says of it, if it did (proxy_client/state_names.py)."""

    def to_write(self, part: Part) -> _store.Contents:
        """What is to be written of it, with the digests that the device server has taken; StoreError."""
        table = {handle: [holder.rank, holder.handle] for handle, holder in part.other_holders.items()}
        loose = [
            (MANIFEST, ROW, self.contents.row),
            (MANIFEST, CONTENT, self.contents.manifest),
            (OTHER_HOLDERS, 0, json.dumps(table).encode()),
        ]
        if self.described:
            loose.append((CLIENT_STATE, 0, self.described))
        return _store.Contents(
            loose, area=self.area, manifest=self.contents.manifest, elsewhere=list(part.other_holders),
            in_place=in_place(self.log),
        )  # fmt: skip


class RankStores:
    """A rank's stores of one run: the newest is written, older ones were too small."""

    def __init__(self, run: Path, rank: int, slots: int, writing: Writing = DEFAULT_WRITING) -> None:
        self._run, self._rank, self._slots, self._writing = run, rank, slots, writing
        self._lock = threading.Lock()
        self._growth = 0
        self._current: _store.Store | None = None
        self._newest = 0
        """Serial of the newest snapshot that the current store holds, or that is under way to it."""
        self._outgrown: dict[Path, tuple[int, _store.Store | None]] = {}
        """Stores whose snapshots are needed until this serial is complete; open ones may still be written."""
        self._find()

    @property
    def serials(self) -> set[int]:
        """What all its stores hold; raises OSError or StoreError."""
        found = set()
        for file in stores_of(self._run):
            if file.rank == self._rank:
                with _store.Store.open(str(file.path), writable=False) as store:
                    found |= {entry.serial for entry in store.snapshots()}
        return found

    def fitting(self, contents: _store.Contents | Sequence[int], serial: int) -> _store.Store:
        """A store with room for these, or for contents of these sizes; raises OSError or StoreError."""
        chunk = self._writing.chunk_bytes
        with self._lock:
            if isinstance(contents, _store.Contents):
                needed = contents.needed_slot_bytes(chunk_bytes=chunk)
            else:
                needed = _store.Store.needed_slot_bytes(contents, chunk_bytes=chunk)
            if (
                self._current is None
                or self._current.slot_bytes < needed
                or self._current.capacity < self._slots  # made before there was a second tier
            ):
                self._grow(round(needed * SLACK), serial)
            assert self._current is not None
            self._newest = max(self._newest, serial)
            return self._current

    def release(self, serial: int, held: int = 0) -> None:
        """It is complete on all ranks: older ones may go, but for the one that is held (0: none)."""
        with self._lock:
            if self._current is not None:
                if held and held < serial:
                    for older in {entry.serial for entry in self._current.snapshots()} - {held}:
                        if older < serial:
                            self._current.discard(older)
                else:
                    self._current.release_before(serial)
            needed_from = min(serial, held or serial)
            for path in [path for path, (until, _) in self._outgrown.items() if until <= needed_from]:
                _, store = self._outgrown.pop(path)
                path.unlink(missing_ok=True)
                if store is not None:
                    store.close()  # only then its blocks are free

    def discard(self, serial: int) -> None:
        """It will never be complete."""
        with self._lock:
            if self._current is not None:
                self._current.discard(serial)

    def close(self) -> None:
        """Nothing more is written; waits for what is under way."""
        with self._lock:
            stores = [self._current, *(store for _, store in self._outgrown.values())]
        for store in stores:
            if store is not None:
                store.close()

    def _find(self) -> None:
        """What another writer of the same run has left."""
        self._run.mkdir(mode=0o700, parents=True, exist_ok=True)
        known = [store for store in stores_of(self._run) if store.rank == self._rank]
        self._growth = max((store.growth for store in known), default=0)
        for store in known:
            if store.growth == self._growth:
                try:
                    self._current = self._open(store.path)
                    self._newest = _newest_in(store.path)
                    continue
                except _store.StoreError as problem:  # damaged, or its writer has not quite ended
                    sys.stderr.write(f"understudy: a new store is begun: {problem}\n")
            self._outgrown[store.path] = (_newest_in(store.path) + 1, None)
        if known and self._current is None:
            self._growth += 1

    def _grow(self, slot_bytes: int, serial: int) -> None:
        if self._current is not None:
            # Not only until `serial`: a set that was slow may outgrow what holds a newer one already.
            until = max(serial, self._newest + 1)
            self._outgrown[store_path(self._run, self._rank, self._growth)] = (until, self._current)
            self._growth += 1
            self._newest = 0
        path = store_path(self._run, self._rank, self._growth)
        half_made = path.with_suffix(".new")
        half_made.unlink(missing_ok=True)
        try:
            _store.Store.create(
                str(half_made),
                slots=self._slots,
                slot_bytes=slot_bytes,
                chunk_bytes=self._writing.chunk_bytes,
            )
            half_made.rename(path)
            sync_entries(path)  # else power may fail, and a store that vouched for snapshots has no name
        except OSError:
            half_made.unlink(missing_ok=True)
            raise
        self._current = self._open(path)

    def _open(self, path: Path) -> _store.Store:
        return _store.Store.open(str(path), pool_bytes=self._writing.pool_bytes)


class RunStores:
    """The stores of one run: those of its ranks that are on this host."""

    def __init__(
        self, run: Path, ranks: Iterable[int], world: int, slots: int, writing: Writing = DEFAULT_WRITING
    ) -> None:
        """Raises OSError."""
        self.of_rank = {rank: RankStores(run, rank, slots, writing) for rank in ranks}
        self.parts_on_other_hosts = len(self.of_rank) < world
        """Whether other hosts write some of the run."""
        self._in_use = contextlib.ExitStack()
        self._in_use.enter_context(in_use(run))
        # A writer that was killed left parts of snapshots that nobody will complete; they would hold slots.
        try:
            held = [stores.serials for stores in self.of_rank.values()]
        except (OSError, _store.StoreError):
            return  # who cannot say what is there must not say what is missing
        for serial in held[0].union(*held) - held[0].intersection(*held):
            self.discard(serial)

    def release(self, serial: int, held: int = 0) -> None:
        """It is complete on all ranks: older ones may go, but for the one that is held (0: none)."""
        for stores in self.of_rank.values():
            with _complaint():
                stores.release(serial, held)

    def close(self) -> None:
        """Nothing more is written; waits for what is under way."""
        for stores in self.of_rank.values():
            stores.close()
        self._in_use.close()

    def discard(self, serial: int) -> None:
        """It will never be complete."""
        for stores in self.of_rank.values():
            with _complaint():
                stores.discard(serial)

    def keep_only(self, known: Collection[int], before: int) -> None:
        """Those of these serials, of what is older: the others are parts of sets that failed unheard."""
        for stores in self.of_rank.values():
            with _complaint():
                for serial in sorted(stores.serials - set(known)):
                    if serial < before:
                        stores.discard(serial)


def _newest_in(path: Path) -> int:
    """Serial of the newest snapshot in a store that is not written any more; 0: there is none to be read."""
    try:
        with _store.Store.open(str(path), writable=False) as store:
            return max((entry.serial for entry in store.snapshots()), default=0)
    except (OSError, _store.StoreError):
        return 0


@contextlib.contextmanager
def _complaint() -> Iterator[None]:
    """Trouble with storage is told, and no more."""
    try:
        yield
    except (OSError, _store.StoreError) as problem:
        sys.stderr.write(f"understudy: slots of snapshots were not freed: {problem}\n")


class JobWriter:
    """Writes for one job's ranks on this host."""

    def __init__(self, directory: Path, job: str, slots: int, writing: Writing, keep_runs: int) -> None:
        self._directory, self._job, self._slots, self._writing = directory, job, slots, writing
        self._keep_runs = keep_runs
        self._tidied: set[str] = set()
        """Runs since whose first complete set former ones have gone."""
        self._runs: dict[str, RunStores] = {}
        self._areas = MappedAreas()
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
            stores = self._runs.get(request.run)
        if stores is None:
            return  # of a writer that was killed: RunStores frees what it left
        if isinstance(request, Release):
            stores.release(request.serial, request.held)
            self._leave_former_runs(request.run)
        else:
            stores.discard(request.serial)

    def _leave_former_runs(self, present: str) -> None:
        """The present run has a complete set: what is older can be let go of, and is not kept for ever."""
        with self._lock:
            if present in self._tidied or present not in self._runs:
                return
            self._tidied.add(present)
            runs = list(self._runs)
            former = [self._runs.pop(run) for run in runs[: runs.index(present)]]
            parts_on_other_hosts = self._runs[present].parts_on_other_hosts
        for stores in former:
            stores.close()
        try:
            remove_old_runs(self._directory / self._job, present, self._keep_runs, parts_on_other_hosts)
        except OSError as problem:
            sys.stderr.write(f"understudy: former runs were not removed: {problem}\n")

    def _persist_all(self, request: Persist) -> None:
        try:
            if not RUN_NAME.fullmatch(request.run):
                raise ValueError(f"{request.run!r} is no name for a run")
            sources = [
                read_source(rank, Path(directory), request.serial, self._areas)
                for rank, directory in sorted(request.directories.items())
            ]
            parts = split({source.rank: holdings(source.contents) for source in sources})
            stores = self._stores_of(request)
            if request.known is not None:
                stores.keep_only(request.known, request.serial)
        except Exception as problem:  # noqa: BLE001 - as below
            for rank in request.directories:
                answer = Written(request.serial, request.run, rank, gone=is_gone(request, rank))
                self._answer(replace(answer, error=str(problem) or repr(problem)))
            return
        for source in sources:
            of_rank = stores.of_rank[source.rank]
            self._pool.submit(self._persist, request, source, parts[source.rank], of_rank)

    def _stores_of(self, request: Persist) -> RunStores:
        with self._lock:
            if request.run not in self._runs:
                self._runs[request.run] = RunStores(
                    self._directory / self._job / request.run, request.directories, request.world,
                    self._slots, self._writing,
                )  # fmt: skip
            stores = self._runs[request.run]
        if stores.of_rank.keys() != request.directories.keys():
            raise ValueError(f"run {request.run} has stores of other ranks here")
        return stores

    def _persist(self, request: Persist, source: Source, part: Part, stores: RankStores) -> None:
        step = source.contents.commit.step
        answer = Written(request.serial, request.run, source.rank, step)
        try:
            contents = source.to_write(part)
            store = stores.fitting(contents, request.serial)
            receipt = store.persist(
                job=self._job, rank=source.rank, world=request.world, step=step,
                serial=request.serial, extents=contents, threads=self._writing.threads, timeout_s=SLOT_FREE_S,
                confirm=lambda: source.log.snapshot_holds(request.serial),
            )  # fmt: skip
        except Exception as problem:  # noqa: BLE001 - proxyd waits for an answer, and holds memory until then
            gone = is_gone(request, source.rank)
            answer = replace(answer, error=str(problem) or repr(problem), gone=gone)
        else:
            answer = replace(answer, bytes=receipt.bytes, seconds=receipt.seconds)
        self._answer(answer)

    def _answer(self, written: Written) -> None:
        with self._answering:
            sys.stdout.buffer.write(written.encode())
            sys.stdout.buffer.flush()


def is_gone(request: Persist, rank: int) -> bool:
    """Whether a rank's host memory does not hold the snapshot any more: a newer one came too soon."""
    try:
        return not replay.Log(request.directories[rank]).snapshot_holds(request.serial)
    except (OSError, replay.LogError):
        return False


def sync_entries(store: Path) -> None:
    """Make a store's name durable, and those of the directories of its run, its job and all jobs.

    Raises OSError.
    """
    for folder in list(store.parents)[:3]:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_source(rank: int, directory: Path, serial: int, areas: MappedAreas) -> Source:
    """A published snapshot of a rank; raises OSError or LogError."""
    log = replay.Log(str(directory))
    contents = log.snapshot_contents(serial)
    area = areas.area(directory)
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


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="understudy-writer")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--job", required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--chunk", type=int, required=True)
    parser.add_argument("--pool", type=int, required=True)
    parser.add_argument("--keep-runs", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    given = parser.parse_args()
    replay.die_with_parent(given.parent)
    writing = Writing(given.threads, given.chunk, given.pool)
    writer = JobWriter(given.directory, given.job, given.slots, writing, given.keep_runs)
    gc.freeze()  # what is there by now stays: no collection has to look at it between two snapshots
    for line in sys.stdin.buffer:
        writer.take(decode_request(line))
    os._exit(0)  # what is under way is cut short, which stores survive


if __name__ == "__main__":
    raise SystemExit(main())
