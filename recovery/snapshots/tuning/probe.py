"""Measures what a store in a directory can do: T_w(N), T_S and a sweep of writers (PCcheck, section 3.4).

The store is a real one in a temporary file, which has no name any more once it is open: whatever ends this
process, the kernel frees its blocks.  Until then a signal that ends us removes it first.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TypeVar

from understudy import replay
from understudy.recovery.base.errors import BadInput
from understudy.recovery.snapshots._store import Store, StoreError
from understudy.recovery.snapshots.persistence import WRITER_THREADS
from understudy.recovery.snapshots.stores.kinds import BUFFER
from understudy.recovery.snapshots.tuning.tuner import size

Value = TypeVar("Value")

MOST_AT_ONCE = 4
"""Snapshots: as many as proxyd leases of a rank for them (settings.py), and the paper tries 1 to 4."""
THREAD_SWEEP = (1, 2, 4)
ROUNDS = 3
LONG_S = 60.0
"""Of measuring; after it, no further round begins."""
PIECE = 64 << 20
"""Bytes of content; a larger snapshot repeats them.  More than most caches hold, and next to nothing of the
memory of a machine that trains."""
PREFIX = ".understudy-probe-"
_SLOT_WAIT_S = 600.0
"""Never waited: there is a slot more than snapshots under way."""


@dataclass(frozen=True)
class Point:
    """What is measured at a time."""

    in_flight: int
    threads: int = WRITER_THREADS


@dataclass(frozen=True)
class Timings:
    """What a probe found, of snapshots of `bytes`."""

    engine: str
    notes: str
    bytes: int
    rounds: int
    write_s: Mapping[int, float]
    """Snapshots begun at once -> seconds until the last was durable."""
    thread_s: Mapping[int, float]
    """Writers of one snapshot -> seconds."""
    copy_bytes_s: float
    """Memory to memory on this host."""

    def write_time_s(self, state_bytes: int) -> dict[int, float]:
        """T_w(N) of snapshots of another size, in proportion to it."""
        return {count: seconds * state_bytes / self.bytes for count, seconds in self.write_s.items()}

    def thread_time_s(self, state_bytes: int) -> dict[int, float]:
        """The same for the sweep of writers."""
        return {count: seconds * state_bytes / self.bytes for count, seconds in self.thread_s.items()}

    @property
    def storage_bytes_s(self) -> float:
        """T_S: the most that any measurement reached."""
        by_count = [count * self.bytes / seconds for count, seconds in self.write_s.items()]
        return max(by_count + [self.bytes / seconds for seconds in self.thread_s.values()])


def points(most: int) -> list[Point]:
    """N from 1 to `most` with proxyd's number of writers, then one snapshot with other numbers of them."""
    return [Point(count) for count in range(1, most + 1)] + [
        Point(1, threads) for threads in THREAD_SWEEP if threads != WRITER_THREADS
    ]


def medians(found: Mapping[Point, Sequence[float]]) -> tuple[dict[int, float], dict[int, float]]:
    """T_w by N, and seconds of one snapshot by its writers."""
    middle = {point: statistics.median(seconds) for point, seconds in found.items()}
    write_s = {point.in_flight: taken for point, taken in middle.items() if point.threads == WRITER_THREADS}
    thread_s = {point.threads: taken for point, taken in middle.items() if point.in_flight == 1}
    return write_s, dict(sorted(thread_s.items()))


class Probe:
    """A store to write to, and what to write; `opened` makes it."""

    def __init__(self, store: Store, path: str, count: int, most: int) -> None:
        self._store, self._most, self._bytes = store, most, count
        self._notes = store.notes.replace(path, "it")  # which has that name no more
        piece = _random(min(count, PIECE))
        whole, rest = divmod(count, len(piece))
        contents = [memoryview(piece)] * whole + ([memoryview(piece)[:rest]] if rest else [])
        digests = {
            len(content): replay.digest(content) for content in contents
        }  # as a device server has them
        self._extents = [
            (BUFFER, number, content, digests[len(content)]) for number, content in enumerate(contents, 1)
        ]
        self._piece = piece
        self._serial = 1
        self._writers = ThreadPoolExecutor(max_workers=most)

    def measure(self) -> Timings:
        """Every point, several times in turn, so that a disk that is busy for a while disturbs all alike."""
        self.once(Point(self._most))  # blocks that are written for the first time cost more
        found: dict[Point, list[float]] = {point: [] for point in points(self._most)}
        begun_s, rounds = time.monotonic(), 0
        while rounds == 0 or (rounds < ROUNDS and time.monotonic() - begun_s < LONG_S):
            for point, seconds in found.items():
                seconds.append(self.once(point))
            rounds += 1
        write_s, thread_s = medians(found)
        return Timings(
            self._store.engine, self._notes, self._bytes, rounds, write_s, thread_s,
            copy_rate(self._piece),
        )  # fmt: skip

    def once(self, point: Point) -> float:
        """Snapshots begun together; seconds until the last is durable.  Raises OSError or StoreError."""
        serials = range(self._serial, self._serial + point.in_flight)
        self._serial = serials.stop
        begun_s = time.monotonic()
        under_way = [self._writers.submit(self._persist, serial, point.threads) for serial in serials]
        for one in under_way:
            one.result()
        taken_s = time.monotonic() - begun_s
        self._store.release_before(self._serial)
        return taken_s

    def while_writing(self, question: Callable[[], Value]) -> Value:
        """What it answers while one snapshot after another is written, which is how proxyd does it."""
        enough = threading.Event()

        def write() -> None:
            while not enough.is_set():
                serial, self._serial = self._serial, self._serial + 1
                self._persist(serial, WRITER_THREADS)
                self._store.release_before(self._serial)

        writing: Future[None] = self._writers.submit(write)
        try:
            answer = question()
        finally:
            enough.set()
        writing.result()
        return answer

    def close(self) -> None:
        """What is under way ends first."""
        self._writers.shutdown()
        self._store.close()

    def _persist(self, serial: int, threads: int) -> None:
        self._store.persist(
            job="probe", rank=0, world=1, step=serial, serial=serial, extents=self._extents, threads=threads,
            timeout_s=_SLOT_WAIT_S,
        )  # fmt: skip


def store_bytes(count: int, most: int) -> int:
    """What a probe needs on the storage: superblocks, and slots with their headers."""
    return 8192 + (most + 1) * (4096 + _slot_bytes(count))


@contextlib.contextmanager
def opened(directory: Path, count: int, most: int) -> Iterator[Probe]:
    """A probe with snapshots of `count` bytes, `most` of them at once; raises BadInput with a sentence."""
    try:
        state = os.statvfs(directory)
        free, needed = state.f_bavail * state.f_frsize, store_bytes(count, most)
        if needed > free:
            raise BadInput(
                f"{directory} has {size(free)} free, and the probe needs {size(needed)} for a while: "
                "free some, or give a smaller --probe-limit"
            )
        folder = directory / f"{PREFIX}{secrets.token_hex(8)}"
        with _prompt_end(folder):
            store = _nameless_store(folder, count, most)
            with contextlib.closing(Probe(store, str(folder / "store"), count, most)) as probe:
                yield probe
    except OSError as problem:
        raise BadInput(f"{directory} cannot be probed: {problem.strerror or problem}") from problem
    except StoreError as problem:
        raise BadInput(f"{directory} cannot be probed: {problem}") from problem


def copy_rate(piece: bytearray) -> float:
    """Bytes per second that one thread copies in memory."""
    target = bytearray(piece)  # its pages are there before the clock runs
    taken = []
    for _ in range(ROUNDS):
        begun_s = time.perf_counter()
        memoryview(target)[:] = piece
        taken.append(time.perf_counter() - begun_s)
    return len(piece) / max(statistics.median(taken), 1e-9)


def _nameless_store(folder: Path, count: int, most: int) -> Store:
    path = str(folder / "store")

    def create_and_open() -> Store:
        Store.create(path, slots=most + 1, slot_bytes=_slot_bytes(count))
        return Store.open(path)

    # In a thread, as a signal is only heard between calls: some file systems take long to find blocks.
    with ThreadPoolExecutor(max_workers=1) as maker:
        folder.mkdir(mode=0o700)
        try:
            return maker.submit(create_and_open).result()
        finally:
            shutil.rmtree(folder)


@contextlib.contextmanager
def _prompt_end(folder: Path) -> Iterator[None]:
    """SIGINT and SIGTERM remove `folder` and end us at once, not after the snapshots under way."""

    def end(number: int, frame: FrameType | None) -> None:
        for _ in range(100):  # the other thread may make the file meanwhile
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    if threading.current_thread() is not threading.main_thread():  # nobody else may set handlers
        yield
        return
    former = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _slot_bytes(count: int) -> int:
    sizes = [min(PIECE, count - begin) for begin in range(0, count, PIECE)]
    return Store.needed_slot_bytes(sizes)


def _random(count: int) -> bytearray:
    """What no file system compresses."""
    return bytearray(os.urandom(count))
