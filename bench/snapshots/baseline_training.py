"""Trains bench/workloads/adam_gpt.py natively, with snapshots taken in somebody else's way.

    python bench/snapshots/baseline_training.py --way GPM --segments 0:3:9,1:3:8 --directory DIR --output FILE

For training_slowdown.py.  A way that stalls is called between two steps, and so is one that copies before it
returns (dcp.async_save).  Where the paper has the copy overlap with the next forward and backward pass
(CheckFreq, Gemini, PCcheck), it does, in a thread, and the next update of the state waits for it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "workloads"))

import psutil
import torch
from adam_gpt import Trainee
from paper_policies import CheckFreq, Gemini, Gpm, PcCheck, prepare, slot_bytes_for
from persist_ways import BLOCK, DONE, Distributed, TorchSave, Way, copy_into, one_rank
from restore_measure import drop_cached_pages
from slowdown_plan import Segment, parsed
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from training_state import State, bytes_of, same

NONE = "none"
IN_FLIGHT = 2
"""[N] of PCcheck: the paper's DRAM of 2 m."""


@dataclass(frozen=True)
class Baseline:
    """How a way is opened, in a new folder, and how it goes together with training."""

    opened: Callable[[Path, State], Way]
    overlaps: bool = False
    """Its copy, with the next forward and backward pass."""


def _area(folder: Path, slots: int, state: State) -> Path:
    """Of which all blocks have been written once."""
    prepare(folder / "area", BLOCK + slots * slot_bytes_for(state))
    return folder / "area"


def _distributed(by: AsyncCheckpointerType | None) -> Baseline:
    return Baseline(lambda folder, state: Distributed(folder / "dcp", by))


BASELINES = {
    "torch.save": Baseline(lambda folder, state: TorchSave(folder / "file")),
    "dcp.save": _distributed(None),
    "dcp.async_save, thread": _distributed(AsyncCheckpointerType.THREAD),
    "dcp.async_save, process": _distributed(AsyncCheckpointerType.PROCESS),
    "GPM": Baseline(lambda folder, state: Gpm(_area(folder, 2, state), state)),
    "CheckFreq": Baseline(lambda folder, state: CheckFreq(folder / "file"), overlaps=True),
    "Gemini": Baseline(lambda folder, state: Gemini(state), overlaps=True),
    "PCcheck": Baseline(
        lambda folder, state: PcCheck(_area(folder, IN_FLIGHT + 1, state), state, IN_FLIGHT), overlaps=True
    ),
}


class Taker:
    """Takes snapshots of a state that is trained."""

    def __init__(self, way: Way, overlaps: bool) -> None:
        self._way = way
        self._copier = ThreadPoolExecutor(1) if overlaps else None
        self._copying: Future[None] = DONE
        self._under_way: list[Future[None]] = []
        self._lock = threading.Lock()
        self._durable_s: list[float] = []

    def take(self, state: State) -> None:
        """Right after an update."""
        begin_s = time.perf_counter()
        if self._copier is None:
            self._save(state, begin_s)
        else:
            self._copying = self._copier.submit(self._save, state, begin_s)

    def before_update(self) -> None:
        """Returns when the state may change."""
        self._copying.result()

    @property
    def busy(self) -> bool:
        """Whether one is still copied or written."""
        return not self._copying.done() or not all(future.done() for future in self._under_way)

    def drain(self) -> list[float]:
        """Waits for all that are under way; seconds from begin to durable of those since the last call."""
        self._copying.result()
        for future in self._under_way:
            future.result()
        with self._lock:
            found, self._durable_s = self._durable_s, []
        self._under_way = []
        return found

    def close(self) -> None:
        self.drain()
        if self._copier is not None:
            self._copier.shutdown()

    def _save(self, state: State, begin_s: float) -> None:
        if isinstance(self._way, Distributed) and self._under_way:
            self._under_way[-1].result()  # as PyTorch's recipe has it: one at a time
        future = self._way.save(state)
        self._under_way.append(future)
        future.add_done_callback(partial(self._note, begin_s))

    def _note(self, begin_s: float, future: Future[None]) -> None:
        with self._lock:
            self._durable_s.append(time.perf_counter() - begin_s)


class Trained(Protocol):
    """What has a state to save."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer


def state_of(trainee: Trained) -> State:
    """Parameters and the optimizer's tensors, in place: it stays right while training goes on."""
    state = {f"model.{name}": value.detach() for name, value in trainee.model.state_dict().items()}
    names = {parameter: name for name, parameter in trainee.model.named_parameters()}
    for parameter, values in trainee.optimizer.state.items():
        state |= {f"{key}.{names[parameter]}": value.detach() for key, value in values.items()}
    return state


def processor_seconds() -> float:
    """Of this process and its children, dead ones included that were waited for."""
    times = psutil.Process().cpu_times()
    used = times.user + times.system + times.children_user + times.children_system
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            of_child = child.cpu_times()
            used += of_child.user + of_child.system
    return used


def step(trainee: Trainee, taker: Taker) -> None:
    loss = trainee.gradients()
    taker.before_update()
    trainee.update()
    loss.item()


def run(segment: Segment, trainee: Trainee, state: State, taker: Taker) -> dict[str, Any]:
    """Train that long; in a steady state nothing need be waited for at the end."""
    begin_s = used = 0.0
    for number in range(segment.warm + segment.steps):
        if number == segment.warm:
            begin_s, used = time.perf_counter(), processor_seconds()
        step(trainee, taker)
        if segment.interval and (number - segment.warm) % segment.interval == 0:
            taker.take(state)
    taken_s, used = time.perf_counter() - begin_s, processor_seconds() - used
    durable_s = taker.drain()
    due = segment.steps // segment.interval if segment.interval else 0
    return asdict(segment) | {
        "step_s": taken_s / segment.steps,
        "processor_s": used / segment.steps,
        "durable_s": durable_s[max(0, len(durable_s) - due) :],
    }


def reload_seconds(way: Way, folder: Path, state: State) -> float:
    """From storage, of which nothing is cached, into the state; raises ValueError if it is another one."""
    expected = {name: tensor.clone() for name, tensor in state.items()}
    for tensor in state.values():
        tensor.zero_()
    if way.durable:
        drop_cached_pages(folder)
    begin_s = time.perf_counter()
    copy_into(state, way.load())
    taken_s = time.perf_counter() - begin_s
    if not same(state, expected):
        raise ValueError("what came back is not what was saved")
    return taken_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--way", choices=BASELINES, required=True)
    parser.add_argument("--segments", type=parsed, required=True, help="INTERVAL:WARM:STEPS,...")
    parser.add_argument("--directory", type=Path, required=True, help="on the disk to measure")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    trainee = Trainee(torch.device("cpu"), asked.tiny)
    start_s = time.time() - psutil.Process().create_time()
    for _ in range(2):  # until the optimizer has its state
        trainee.gradients()
        trainee.update()
    state = state_of(trainee)
    baseline = BASELINES[asked.way]
    with tempfile.TemporaryDirectory(prefix="baseline-", dir=asked.directory) as name, one_rank():
        folder = Path(name)
        with (
            baseline.opened(folder, state) as way,
            contextlib.closing(Taker(way, baseline.overlaps)) as taker,
        ):
            taker.take(state)  # what is made once, is made
            taker.drain()
            found = []
            for segment in asked.segments:
                found.append(run(segment, trainee, state, taker))
                print(f"segment {json.dumps(found[-1])}", flush=True)
                if segment.interval:
                    way.clean()
            way.save(state).result()
            load_s = reload_seconds(way, folder, state)
    results = {"start_s": start_s, "load_s": load_s, "state_bytes": bytes_of(state), "segments": found}
    asked.output.write_text(json.dumps(results))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
