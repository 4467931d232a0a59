"""`make bench-jit`: what a fault costs under `understudy.jit`, in parts, and what none costs.

    .venv/bin/python bench/jit/jit_cost.py [--quick] [--seed N] [--patience SECONDS] [--output FILE]

writes bench/results/jit.json and docs/reports/jit.md; with --quick, whose figures mean nothing, only
bench/results/jit-quick.json. bench/README.md says how each number is taken.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fault_plan
import fault_runs
import jit_report
import recovery_parts
import steady_cost
from fault_plan import Fault
from jit_results import WAYS, Results
from machine import ROOT, describe_machine
from recovery_parts import Recovery
from steady_cost import Spread
from training_run import RunFailed

from understudy.campaigns.results.stamps import Stamp

SETTING = fault_runs.Setting(timeout=10.0, minimum_stall=2.0, patience=2.0)
ATTEMPTS = 3
"""Of a job without `jit`, which PyTorch or Gloo may spoil; nothing of ours is ever excused so."""


@dataclass(frozen=True)
class Effort:
    """How long to measure. `faults`: of each kind in a job, of which there are two a turn."""

    turns: int
    faults: int
    rounds: int
    models: tuple[str, ...]
    tiny: bool = False


FULL = Effort(turns=5, faults=2, rounds=10, models=("mlp:150", "gpt:12", "convolutions:8"))
QUICK = Effort(turns=1, faults=1, rounds=1, models=("mlp:5", "gpt:1", "convolutions:1"), tiny=True)


class FaultRuns:
    """The jobs of all turns, and what was found in them."""

    def __init__(self, effort: Effort, seed: int, setting: fault_runs.Setting, folder: Path) -> None:
        self.recoveries: dict[str, list[Recovery]] = {way: [] for way in WAYS}
        self.repeated: list[str] = []
        self.checkpoints: list[float] = []
        self.losses = 0
        self._effort, self._seed, self._setting, self._folder = effort, seed, setting, folder
        self._steps = fault_plan.steps(effort.faults)
        _say("a training without faults")
        undisturbed = self._run("undisturbed", (), 0)
        self._expected = recovery_parts.losses(undisturbed)
        self.step = recovery_parts.step_seconds(undisturbed)

    def turn(self, number: int) -> None:
        """A job of each way, with the same faults; who is first changes. Raises RunFailed."""
        faults = fault_plan.draw(self._seed, number, self._effort.faults)
        for way in WAYS if number % 2 == 0 else WAYS[::-1]:
            _say(f"turn {number + 1} of {self._effort.turns}, {way}: {' '.join(map(str, faults))}")
            stamps = self._run(way, faults, number)
            self._compare(stamps, f"{way}, turn {number + 1}")
            self.recoveries[way] += self._recoveries(stamps, faults, way)
            self.checkpoints += recovery_parts.checkpoint_seconds(stamps)

    def _run(self, way: str, faults: Sequence[Fault], turn: int) -> list[Stamp]:
        for attempt in range(ATTEMPTS):
            folder = self._folder / f"{way}-{turn}-{attempt}"
            try:
                stamps = fault_runs.run(way, faults, self._steps, self._setting, folder)
                recovery_parts.recoveries(stamps, faults)
                return stamps
            except (RunFailed, recovery_parts.Unexpected) as problem:
                if way == "jit" or attempt == ATTEMPTS - 1:
                    raise
                self.repeated.append(f"{way}, turn {turn + 1}: {str(problem).splitlines()[-1][:200]}")
        raise AssertionError("the last attempt raises")

    def _compare(self, stamps: Sequence[Stamp], name: str) -> None:
        """Raises RunFailed where a single bit differs, or a step was never completed."""
        if recovery_parts.losses(stamps) != self._expected:
            raise RunFailed(f"{name}: the losses are not those of the undisturbed training")
        self.losses += sum(stamp.what == "step" for stamp in stamps)

    def _recoveries(self, stamps: Sequence[Stamp], faults: Sequence[Fault], way: str) -> list[Recovery]:
        found = recovery_parts.recoveries(stamps, faults)
        for one in found:
            planned = 0 if way == "jit" else one.behind % fault_plan.EVERY
            if one.redone != planned:
                raise RunFailed(f"{way} did {one.redone} steps once more, behind step {one.behind}")
        return found


def measure(
    effort: Effort, seed: int, setting: fault_runs.Setting, command: str, keep: Callable[[Results], None]
) -> Results:
    """All of it; what is there before the last part is given to `keep`.

    Raises RunFailed and Unexpected, also where losses differ in a single bit.
    """
    begun = time.monotonic()
    machine: dict[str, Any] = describe_machine() | {"python": platform.python_version()}
    with tempfile.TemporaryDirectory(prefix="understudy-bench-") as folder:
        runs = FaultRuns(effort, seed, setting, Path(folder))
        for number in range(effort.turns):
            runs.turn(number)
        found = Results(
            machine=machine | {"load_after": os.getloadavg()[0]},
            seed=seed,
            command=command,
            setting=asdict(setting),
            took=time.monotonic() - begun,
            recoveries=runs.recoveries,
            repeated=runs.repeated,
            losses=runs.losses,
            step=runs.step,
            checkpoint=Spread.of(runs.checkpoints) if runs.checkpoints else None,
            steady=[],
        )
        keep(found)
        _say("steps with and without jit, in turns")
        steady = steady_cost.measure(effort.models, effort.rounds, Path(folder) / "steady")
    machine["load_after"] = os.getloadavg()[0]
    return replace(found, machine=machine, took=time.monotonic() - begun, steady=steady)


def _say(what: str) -> None:
    print(f"bench-jit: {what}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run: the numbers mean nothing")
    parser.add_argument("--seed", type=int, default=1, help="of ranks and steps of faults")
    parser.add_argument(
        "--patience", type=float, default=SETTING.patience,
        help="seconds until a stopped process is killed; from 30 on, by torchrun itself",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, help="JSON elsewhere")
    parser.add_argument("--report", type=Path, help="Markdown elsewhere")
    options = parser.parse_args(arguments)
    effort, results = QUICK if options.quick else FULL, ROOT / "bench" / "results"
    output = options.output or results / ("jit-quick.json" if options.quick else "jit.json")
    report = options.report or (None if options.quick else jit_report.REPORT)
    setting = replace(SETTING, patience=options.patience, tiny=effort.tiny)
    command = "make bench-jit" + (" OPTIONS=--quick" if options.quick else "")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        found = measure(effort, options.seed, setting, command, lambda part: part.write(output))
    except (RunFailed, recovery_parts.Unexpected) as problem:
        print(f"bench-jit: {problem}", file=sys.stderr)
        return 1
    found.write(output)
    page = jit_report.render(found)
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(page)
    print(page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
