"""How fast a replica's state reaches a new device server, against memcpy between two processes."""

import os
import statistics
import time
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

from training_run import RunFailed, Training

Results = dict[str, Any]
STATE_BYTES = 256 << 20
EVERY = 8
REPEATS = 8
GOAL = 0.5


def memcpy_rate(count: int = STATE_BYTES, repeats: int = REPEATS) -> float:
    """GB/s, median: what another process has written into shared memory, into fresh memory of this one."""
    shared = shared_memory.SharedMemory(create=True, size=count)
    memory = memoryview(shared.buf or b"")
    try:
        writer = os.fork()
        if writer == 0:
            memory[:count] = os.urandom(1 << 20) * (count >> 20)
            os._exit(0)
        if os.waitpid(writer, 0)[1] != 0:
            raise RunFailed("the process that fills shared memory failed")
        rates = []
        for _ in range(repeats):
            begin = time.perf_counter()
            copied = bytes(memory[:count])
            rates.append(len(copied) / (time.perf_counter() - begin) / 1e9)
        return statistics.median(rates)
    finally:
        memory.release()
        shared.close()
        shared.unlink()


def measure(count: int, folder: Path) -> Results:
    """`count` restarts of a rank whose state another one holds.  Raises RunFailed."""
    drills = tuple(f"kill-server rank={n % 2} step={EVERY * (n + 2)} call=3" for n in range(count))
    training = Training(
        "bench/workloads/wide_state.py", 2, EVERY * (count + 2) + 4, ["--bytes", str(STATE_BYTES)]
    )
    found = training.run(folder / "copies", proxied=True, drills=drills).report["recoveries"]
    copied = [entry for entry in found if entry["copied_bytes"] >= STATE_BYTES]
    if len(copied) < count:
        raise RunFailed(f"{len(copied)} of {count} restarts copied {STATE_BYTES} bytes of state")
    rate = statistics.median(entry["copied_bytes"] / entry["copy_s"] / 1e9 for entry in copied)
    memcpy = memcpy_rate()
    return {"restarts": len(copied), "gb_per_s": rate, "memcpy_gb_per_s": memcpy, "share": rate / memcpy}


def rows(results: Results) -> list[tuple[str, str, str]]:
    """For the table: what, measured, and more."""
    return [
        (
            "state copied from a replica",
            f"{results['gb_per_s']:.2f} GB/s",
            f"{100 * results['share']:.0f} % of memcpy between processes "
            f"({results['memcpy_gb_per_s']:.2f} GB/s), goal {100 * GOAL:.0f} %",
        )
    ]
