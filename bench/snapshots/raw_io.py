"""How fast the storage engines write and read, against the plainest loop of direct I/O that the disk allows.

    .venv/bin/python bench/snapshots/raw_io.py --folder DIR    # table, and bench/results/raw_io.json

One file for all, at most 2 GiB, removed at the end.  In each round the raw loop and every engine take turns,
in random order, for each block size and number of threads.  A write ends with its sync; what is read is not
in the page cache of this machine (it may be in that of a host below).
"""

import argparse
import contextlib
import json
import mmap
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.progress import track
from rich.table import Table

from understudy.recovery.text.tables import make_console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from machine import ROOT, describe_machine

from understudy.recovery.snapshots._storage import Storage, create_file, raw_loop

MIB = 1 << 20
RAW = "raw loop"
ENGINES = ["uring", "direct", "buffered", "mmap", "dax"]
MOST_BYTES = 2 << 30
QUIET_LOAD = 0.5


@dataclass(frozen=True)
class Way:
    """How bytes are moved: by whom, in what blocks (bytes), by how many threads."""

    kind: str
    block: int
    threads: int


def timed(action: Callable[[], None], count: int) -> float:
    """GB/s of an action that moves `count` bytes."""
    begin = time.perf_counter()
    action()
    return count / (time.perf_counter() - begin) / 1e9


def drop_cached_pages(path: str) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def move(path: str, way: Way, depth: int, data: mmap.mmap) -> tuple[float, float]:
    """GB/s of a durable write and of a read of the whole file."""
    drop_cached_pages(path)
    if way.kind == RAW:
        write = len(data) / raw_loop(path, True, data, way.block, way.threads, depth) / 1e9
        drop_cached_pages(path)
        return write, len(data) / raw_loop(path, False, data, way.block, way.threads, depth) / 1e9
    storage = Storage(path, way.kind)

    def write_all() -> None:
        storage.write(0, data, way.block, way.threads, depth)
        storage.sync()

    with contextlib.closing(storage):
        write = timed(write_all, len(data))
    drop_cached_pages(path)  # closed before: pages that are mapped stay in the cache
    with contextlib.closing(Storage(path, way.kind, False)) as reader:
        return write, timed(lambda: reader.read(0, data, way.block, way.threads), len(data))


def available(path: str) -> tuple[dict[str, str], dict[str, str]]:
    """Engines that work there with what they call themselves, and why the others do not."""
    found, reasons = {}, {}
    for kind in ENGINES:
        try:
            with contextlib.closing(Storage(path, kind)) as storage:
                found[kind] = storage.engine
        except OSError as error:
            reasons[kind] = str(error)
    return found, reasons


@contextlib.contextmanager
def storage_file(folder: Path, count: int) -> Iterator[str]:
    """A file whose blocks have all been written once: the first write of a block also changes metadata."""
    inner = tempfile.mkdtemp(prefix="understudy-raw-io-", dir=folder)
    try:
        create_file(f"{inner}/storage", count)
        yield f"{inner}/storage"
    finally:
        shutil.rmtree(inner)


def memory(count: int) -> mmap.mmap:
    """In huge pages where the kernel gives them: direct I/O in fewer pieces is up to half as fast again."""
    data = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        data.madvise(mmap.MADV_HUGEPAGE)
    data[:] = os.urandom(MIB) * (count // MIB)
    return data


def measure(path: str, ways: list[Way], rounds: int, depth: int, count: int) -> list[dict[str, Any]]:
    data = memory(count)
    raw_loop(path, True, data, 4 * MIB, 1, depth)
    rates: dict[Way, list[tuple[float, float]]] = {way: [] for way in ways}
    turns = [way for _ in range(rounds) for way in random.sample(ways, len(ways))]  # no one always after mmap
    for turn in track(turns, "measuring", transient=True):
        rates[turn].append(move(path, turn, depth, data))
    rows = []
    for way, pairs in rates.items():
        writes, reads = zip(*pairs, strict=True)
        medians = {"write": statistics.median(writes), "read": statistics.median(reads)}
        rows.append({**asdict(way), **medians, "writes": writes, "reads": reads})
    return rows


def limits(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The best the raw loop did with any block size and number of threads."""
    raw = [row for row in rows if row["kind"] == RAW]
    return {side: max(row[side] for row in raw) for side in ("write", "read")}


def table(rows: list[dict[str, Any]], names: dict[str, str], limit: dict[str, float], title: str) -> Table:
    shown = Table(title=title, caption="GB/s, medians; % of the raw loop's best")
    blocks = sorted({row["block"] for row in rows})
    shown.add_column("engine")
    shown.add_column("threads", justify="right")
    for side in ("write", "read"):
        for block in blocks:
            shown.add_column(f"{side}\n{block // MIB} MiB", justify="right")
    cells = {(row["kind"], row["threads"], row["block"]): row for row in rows}
    for kind, threads in dict.fromkeys((row["kind"], row["threads"]) for row in rows):
        found = [
            (cells[kind, threads, block][side], limit[side]) for side in ("write", "read") for block in blocks
        ]
        texts = [f"{rate:.2f} {100 * rate / most:3.0f}%" for rate, most in found]
        shown.add_row(names.get(kind, kind), str(threads), *texts)
    return shown


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure, not tmpfs")
    parser.add_argument("--mib", type=int, default=256, help="size of the file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--depth", type=int, default=8, help="blocks under way per thread")
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 4, 16], help="MiB")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "raw_io.json")
    given = parser.parse_args()
    if not 0 < given.mib * MIB <= MOST_BYTES:
        parser.error("the file has 1 to 2048 MiB")
    if given.rounds < 1 or min(given.blocks) < 1 or min(given.threads) < 1 or not 1 <= given.depth <= 32:
        parser.error("rounds, blocks and threads are at least 1; depth is 1 to 32")
    return given


def main() -> None:
    given = options()
    console = make_console()
    machine = describe_machine()
    kind = subprocess.run(
        ["stat", "-f", "-c", "%T", str(given.folder)], capture_output=True, text=True
    ).stdout.strip()
    if kind == "tmpfs":
        console.print("This folder is memory: nothing about a disk is measured.", style="yellow")
    with storage_file(given.folder, given.mib * MIB) as path:
        engines, reasons = available(path)
        ways = [
            Way(kind, block * MIB, threads)
            for block in given.blocks
            for threads in given.threads
            for kind in [RAW, *engines]
        ]
        rows = measure(path, ways, given.rounds, given.depth, given.mib * MIB)
    limit = limits(rows)
    busy = float(machine["load_before"]) > QUIET_LOAD
    results = {
        "machine": machine,
        "busy": busy,
        "file_system": kind,
        "bytes": given.mib * MIB,
        "rounds": given.rounds,
        "depth": given.depth,
        "limit": limit,
        "engines": engines,
        "not_available": reasons,
        "rows": [
            {**row, "of_limit": {side: row[side] / limit[side] for side in ("write", "read")}} for row in rows
        ],
    }
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(results, indent=1) + "\n")
    title = f"storage engines on {kind}, {given.mib} MiB, depth {given.depth}" + (
        f" (busy machine: load {machine['load_before']:.1f})" if busy else ""
    )
    console.print(table(rows, engines, limit, title))
    for engine, reason in reasons.items():
        console.print(f"no {engine}: {reason}")


if __name__ == "__main__":
    main()
