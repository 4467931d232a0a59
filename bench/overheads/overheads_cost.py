"""`make bench-overheads`: paper 001's Table 3, what ways of recovering cost while nothing fails.

    .venv/bin/python bench/overheads/overheads_cost.py [--quick] [--seed N] [--directory DIR] [--output FILE]

writes bench/results/overheads.json, of which `make cost` makes a part of docs/cost.md; with --quick, whose
figures mean nothing, only bench/results/overheads-quick.json.  bench/README.md says how each number is taken.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "jit"))
sys.path.insert(2, str(Path(__file__).resolve().parent.parent / "snapshots"))
sys.path.insert(3, str(Path(__file__).resolve().parent.parent / "workloads"))

import overheads_page
import periodic_training
import steady_cost
from machine import ROOT, describe_machine
from overheads_results import Jit, Model, Ours, Results, minibatches_of, stalls_of
from slowdown_plan import Segment
from slowdown_runs import LONGEST_S, Proxied, proxied
from training_run import RunFailed, Training, execute_natively

MEMORY = Path("/dev/shm")
INTERVAL = 10
"""Minibatches between two snapshots of ours on storage, where their cost is measured."""


@dataclass(frozen=True)
class Workload:
    """A training that all ways are measured on."""

    model: str
    """As periodic_training.py and bench/jit/steady_models.py call it."""
    script: str
    arguments: tuple[str, ...]
    jit_steps: int
    """Of a block."""
    tiny: bool = False


WORKLOADS = (
    Workload("adam_gpt", "bench/workloads/adam_gpt.py", (), jit_steps=4),
    Workload("resnet18", "bench/workloads/resnet18_cifar.py", ("--log-every", "1"), jit_steps=6),
)
TINY = (Workload("adam_gpt_tiny", "bench/workloads/adam_gpt.py", (), jit_steps=2, tiny=True),)


@dataclass(frozen=True)
class Effort:
    """How long to measure each model; of rounds there are fewer where they take longer than `…_s`."""

    rounds: int
    """Of periodic ways."""
    block: int
    """Steps."""
    periodic_s: float
    jit_rounds: int
    our_rounds: int
    ours_s: float
    plain: Segment
    """Of ours, and natively."""
    persisted: Segment
    workloads: Sequence[Workload]


FULL = Effort(
    rounds=12, block=6, periodic_s=70, jit_rounds=12, our_rounds=6, ours_s=160,
    plain=Segment(0, 6, 2 * INTERVAL), persisted=Segment(INTERVAL, 2 * INTERVAL, 2 * INTERVAL, 6),
    workloads=WORKLOADS,
)  # fmt: skip
QUICK = Effort(
    rounds=2, block=2, periodic_s=5, jit_rounds=1, our_rounds=1, ours_s=0,
    plain=Segment(0, 6, 20), persisted=Segment(50, 100, 200, 200), workloads=TINY,
)  # fmt: skip


class Measurement:
    """Of one model."""

    def __init__(self, effort: Effort, workload: Workload, seed: int, disk: Path, memory: Path) -> None:
        self._effort, self._workload, self._seed = effort, workload, seed
        self._disk, self._memory = disk, memory

    def model(self) -> Model:
        """Raises RunFailed."""
        periodic = self._periodic()
        overlaps = {name: way.overlaps for name, way in periodic_training.WAYS.items()}
        return Model(
            name=self._workload.model.removesuffix("_tiny"),
            parameters=periodic["parameters"],
            state_bytes=periodic["state_bytes"],
            minibatch=minibatches_of(periodic["rounds"]),
            stalls=stalls_of(periodic["rounds"], overlaps),
            jit=self._jit(),
            ours=self._ours(),
        )

    def _periodic(self) -> dict[str, Any]:
        _say(f"{self._workload.model}: periodic checkpoints, in turns")
        output = self._disk / "periodic.json"
        command = [
            sys.executable, str(periodic_training.__file__), "--model", self._workload.model,
            "--disk", str(self._disk), "--memory", str(self._memory), "--rounds", str(self._effort.rounds),
            "--steps", str(self._effort.block), "--seconds", str(self._effort.periodic_s),
            "--seed", str(self._seed), "--output", str(output),
        ]  # fmt: skip
        execute_natively(command, LONGEST_S)
        found: dict[str, Any] = json.loads(output.read_text())
        return found

    def _jit(self) -> Jit:
        _say(f"{self._workload.model}: steps of two ranks with and without jit, in turns")
        asked = f"{self._workload.model}:{self._workload.jit_steps}"
        (found,) = steady_cost.run([asked], self._effort.jit_rounds, self._disk / "jit")
        cost = steady_cost.cost_of(found)
        return Jit(cost.step, steady_cost.ratios_of(found), cost.spent)

    def _ours(self) -> Ours:
        effort, order = self._effort, random.Random(self._seed)
        native: list[float] = []
        plain: list[Proxied] = []
        persisted: list[Proxied] = []
        begin, longest = time.monotonic(), 0.0
        for number in range(effort.our_rounds):
            since = time.monotonic()
            if number and since + longest > begin + effort.ours_s:
                break
            _say(f"{self._workload.model}: natively and proxied, round {number + 1}")
            tasks: list[Callable[[], None]] = [
                lambda n=number: native.append(self._native(n)),  # type: ignore[misc]
                lambda n=number: plain.append(self._proxied(effort.plain, f"plain-{n}")),  # type: ignore[misc]
                lambda n=number: persisted.append(self._proxied(effort.persisted, f"persisted-{n}")),  # type: ignore[misc]
            ]
            for task in order.sample(tasks, len(tasks)):
                task()
            longest = max(longest, time.monotonic() - since)
        return Ours(
            native,
            [one.step_s for one in plain],
            [one.step_s for one in persisted],
            [one.segment.steps / self._durable(one) for one in persisted],
        )

    def _native(self, number: int) -> float:
        """Seconds of a step: the mean, as of proxied ones."""
        segment = self._effort.plain
        arguments = [*self._workload.arguments, *(["--tiny"] if self._workload.tiny else [])]
        training = Training(self._workload.script, 1, segment.warm + segment.steps, arguments)
        outcome = training.run(self._disk / f"native-{number}", proxied=False)
        return statistics.fmean(outcome.seconds[0][segment.warm :])

    def _proxied(self, segment: Segment, name: str) -> Proxied:
        return proxied(
            segment, self._disk / name, self._workload.tiny,
            script=self._workload.script, arguments=self._workload.arguments,
        )  # fmt: skip

    def _durable(self, run: Proxied) -> int:
        """How many snapshots; raises RunFailed if none was."""
        if not run.durable:
            raise RunFailed(f"no snapshot of {self._workload.model} became durable while it was measured")
        return len(run.durable)


def measure(effort: Effort, seed: int, directory: Path, command: str) -> Results:
    """All of it.  Raises RunFailed."""
    begun = time.monotonic()
    machine: dict[str, Any] = describe_machine() | {"python": platform.python_version()}
    models = []
    for workload in effort.workloads:
        with (
            tempfile.TemporaryDirectory(prefix="understudy-bench-", dir=directory) as disk,
            tempfile.TemporaryDirectory(prefix="understudy-bench-", dir=MEMORY) as memory,
        ):
            models.append(Measurement(effort, workload, seed, Path(disk), Path(memory)).model())
    machine["load_after"] = os.getloadavg()[0]
    return Results(machine, command, seed, time.monotonic() - begun, models)


def _say(what: str) -> None:
    print(f"bench-overheads: {what}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Entry point; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run: the numbers mean nothing")
    parser.add_argument("--seed", type=int, default=1, help="of the order in each round")
    parser.add_argument("--directory", type=Path, default=ROOT / "build", help="on the disk to measure")
    parser.add_argument("--output", type=Path, help="JSON elsewhere")
    options = parser.parse_args(arguments)
    name = "overheads-quick.json" if options.quick else "overheads.json"
    output = options.output or ROOT / "bench" / "results" / name
    command = "make bench-overheads" + (" OPTIONS=--quick" if options.quick else "")
    options.directory.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        found = measure(QUICK if options.quick else FULL, options.seed, options.directory.absolute(), command)
    except RunFailed as problem:
        print(f"bench-overheads: {problem}", file=sys.stderr)
        return 1
    found.write(output)
    print(overheads_page.section(found))
    print(f"written to {output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
