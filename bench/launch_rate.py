"""How many records an executor runs in a second: `python bench/launch_rate.py [RUNS]`.

Small calls, and optimizer steps whose pre-images are kept, on the driver of UNDERSTUDY_TEST_DRIVER. Counted
are seconds of the executor's thread, so that other work on the machine matters little. What
`simulated-cuda` gives is a CPU's rate, and no result of a GPU.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
HARNESS = TESTS / "harness"
sys.path[:0] = [
    str(HARNESS),
    *(str(HARNESS / one) for one in ("devices", "processes")),
    str(TESTS.parent / "bench"),
]

import simulated_device  # noqa: E402

if simulated_device.wanted():
    if "SIMULATED_CUDA_LIBRARY" not in os.environ:
        surroundings = os.environ | simulated_device.environment()
        if others := os.environ.get("PYTHONPATH"):
            surroundings["PYTHONPATH"] += os.pathsep + others
        os.execve(sys.executable, [sys.executable, *sys.argv], surroundings)
    simulated_device.load()

from executor_harness import OPERATOR, PHASE, Harness, double, vector  # noqa: E402
from proxied import until  # noqa: E402

BUFFERS, LENGTH = 40, 64
"""That an optimizer step writes, each of so many floats."""
CALLS, STEPS = 100, 60
"""In each step, and steps of a run."""
TENSOR_LIST, CONSTANT_DOUBLE = 4, 17


def threads() -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir()}


def nanoseconds(thread: str) -> int:
    """On a processor so far."""
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0])


def templates(h: Harness) -> tuple[int, int]:
    """Of a small call, and of an optimizer's."""
    small = h.template("aten::add_.Tensor", [*vector(), *vector(), CONSTANT_DOUBLE, double(1.0)])
    key = [TENSOR_LIST | BUFFERS << 8, *(vector(LENGTH) * BUFFERS), CONSTANT_DOUBLE, double(1.0)]
    return small, h.template("aten::_foreach_add_.Scalar", key, outputs=[])


def records(h: Harness, small: int, optimizer: int) -> None:
    """Those of one run: calls that write one buffer, then one that writes all others, and a commit."""
    for _ in range(STEPS):
        for _ in range(CALLS):
            h.writer.append(OPERATOR, small, [BUFFERS + 1, BUFFERS + 1])
        h.writer.append(PHASE, 1, [])
        h.writer.append(OPERATOR, optimizer, list(range(1, BUFFERS + 1)))
        h.commit()
        h.writer.append(PHASE, 0, [])


def rates(runs: int) -> list[float]:
    before = threads()
    found = []
    with Harness(segment_count=64) as h:
        started = threads() - before
        of_calls = templates(h)
        for handle in range(1, BUFFERS + 1):
            h.new(handle, [0.0] * LENGTH)
        h.new(BUFFERS + 1, [0.0] * 4)
        h.commit()
        h.log.floor_commit = 1 << 40  # peers are always there already
        h.synchronize()
        for run in range(runs + 1):
            h.executor.park()
            first = h.log.tail_index
            records(h, *of_calls)
            began = {thread: nanoseconds(thread) for thread in started}
            h.executor.resume()
            until(lambda: h.log.cursor_index == h.log.tail_index, "all is done", 600, pause_s=0.005)
            taken = max(nanoseconds(thread) - then for thread, then in began.items())  # the executor's
            if run > 0:  # the first learns templates and shapes
                found.append((h.log.tail_index - first) / taken * 1e9)
    return found


if __name__ == "__main__":
    found = rates(int(sys.argv[1]) if sys.argv[1:] else 5)
    print(
        json.dumps({"records_per_s": round(statistics.median(found)), "runs": [round(one) for one in found]})
    )
