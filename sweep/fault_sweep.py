"""A fault at every call of one minibatch of three small models: the results must not change by one bit.

    make sweep                                  # everything; goes on where it stopped
    make sweep OPTIONS="--sample 150 --seed 7"  # a seeded choice
    make sweep OPTIONS="--model gan --fault kill-server"

Many points share one training: each fault strikes another iteration at another call, and a wrong bit
would stay to the end. Writes sweep/results/ledger.jsonl and, when everything was run, docs/sweep.md.
Exit status 1 if anything differed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter, deque
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

from machine import describe_machine
from rich.console import Console
from sweep_models import COMMITS, MODELS
from sweep_points import (
    FAULTS,
    Ledger,
    Outcome,
    Point,
    all_points,
    iteration_of,
    iterations,
    runs,
    sample,
    step_of,
)
from sweep_report import write_report
from training_run import ROOT, RunFailed, Training
from training_run import Outcome as Run

RESULTS = ROOT / "sweep" / "results"
PROBE_POINTS = 2


def train(
    model: str, steps: int, folder: Path, drills: tuple[str, ...] = ()
) -> tuple[Run, list[dict[str, str]]]:
    """One training of two ranks; answers it and each rank's final state."""
    run = Training("sweep/sweep_models.py", 2, steps, ["--model", model]).run(
        folder, proxied=True, drills=drills
    )
    names = ("state.json", "state.json.rank1")
    return run, [json.loads((folder / name).read_text()) for name in names]


def calls_of(model: str, run: Run) -> list[int]:
    """Records in each minibatch of an iteration, once shapes are learnt."""
    recent = run.report["recent_calls"]  # of minibatch n, from 1, in n modulo their number
    commits = COMMITS[model]
    return [
        min(calls for slot, calls in enumerate(recent) if (slot - 1) % commits == commit)
        for commit in range(commits)
    ]


def _first_difference(unfaulted: Run, faulted: Run, steps: int) -> int | None:
    """The first iteration whose values differ on any rank."""
    found: list[int] = []
    for ours, theirs in zip(unfaulted.losses, faulted.losses, strict=True):
        per_iteration = len(ours) // steps
        pairs = enumerate(zip(ours, theirs, strict=True))
        found += [place // per_iteration for place, (one, other) in pairs if one != other][:1]
    return min(found, default=None)


class Sweep:
    """Runs points against unfaulted runs of the same length."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._references: dict[tuple[str, int], tuple[Run, list[dict[str, str]]]] = {}
        self._number = 0

    def _reference(self, model: str, steps: int) -> tuple[Run, list[dict[str, str]]]:
        if (model, steps) not in self._references:
            self._references[model, steps] = train(model, steps, self._new_folder())
        return self._references[model, steps]

    def _new_folder(self) -> Path:
        self._number += 1
        return self._folder / str(self._number)

    def count_calls(self, model: str, room: int) -> list[int]:
        """Records in each minibatch of an iteration; `room`: as for `strike`."""
        return calls_of(model, self._reference(model, iterations(room))[0])

    def strike(self, points: list[Point], room: int = 0) -> list[Outcome]:
        """One training with a fault for each point; `room`: it is as long as one with that many points."""
        model, steps = points[0].model, iterations(max(len(points), room))
        unfaulted, state = self._reference(model, steps)
        drills = tuple(
            f"{point.fault} rank={point.rank} step={step_of(point, place)} call={point.call}"
            for place, point in enumerate(points)
        )
        try:
            faulted, faulted_state = train(model, steps, self._new_folder(), drills)
        except RunFailed as failure:
            return [Outcome(point, "", "", False, 0.0, 0.0, str(failure)[-2000:]) for point in points]
        broken = _first_difference(unfaulted, faulted, steps)
        if broken is None and state != faulted_state:
            broken = steps
        of_step = {(entry["rank"], entry["step"]): entry for entry in faulted.report["recoveries"]}
        outcomes = []
        for place, point in enumerate(points):
            entry = of_step.get((point.rank, step_of(point, place)))
            problem = "no recovery was reported" if entry is None else ""
            if entry and not entry["recovered"]:
                problem = entry["reason"]
            struck_next = iteration_of(place + 1)
            guilty = broken is not None and (broken < struck_next or place == len(points) - 1)
            outcomes.append(
                Outcome(
                    point,
                    entry["plan"] if entry else "",
                    entry["phase"] if entry else "",
                    not guilty,
                    entry["detect_s"] if entry else 0.0,
                    entry["total_s"] if entry else 0.0,
                    problem or (f"values differ from iteration {broken} on" if guilty else ""),
                )
            )
            if guilty:
                break  # what struck later struck a training that was wrong already: it is run again
        return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, action="append", help="default: all")
    parser.add_argument("--fault", choices=FAULTS, action="append", help="default: all")
    parser.add_argument(
        "--sample", type=int, default=0, metavar="N", help="a seeded choice of about N points"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fresh", action="store_true", help="forget what was run before")
    arguments = parser.parse_args()
    console = Console()
    ledger_path = RESULTS / "ledger.jsonl"
    if arguments.fresh:
        ledger_path.unlink(missing_ok=True)
    ledger = Ledger(ledger_path)
    models, faults = arguments.model or list(MODELS), arguments.fault or list(FAULTS)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sweep = Sweep(folder)
        calls = {model: sweep.count_calls(model, PROBE_POINTS) for model in models}
        wanted = all_points(calls, models, faults)
        if arguments.sample:
            wanted = sample(wanted, arguments.sample, arguments.seed)
        missing = [point for point in wanted if point not in ledger.outcomes]
        console.print(
            f"{len(wanted)} points, {len(missing)} to run; records per minibatch: {calls}; "
            f"seed {arguments.seed}"
        )
        waiting = deque(runs(missing))
        while waiting:
            points = waiting.popleft()
            outcomes = sweep.strike(points)
            ledger.add(outcomes)
            if len(outcomes) < len(points):
                waiting.append(points[len(outcomes) :])
            bad = [outcome for outcome in outcomes if outcome.problem or not outcome.identical]
            console.print(
                f"{points[0].model} {points[0].fault} {points[0].commit}/{points[0].call} to "
                f"{points[-1].commit}/{points[-1].call}: {len(outcomes) - len(bad)} of {len(outcomes)} "
                f"identical ({time.monotonic() - begin:.0f} s)"
            )
            for outcome in bad[:3]:
                console.print(f"  {outcome.point}: {outcome.problem}", markup=False)
    done = [ledger.outcomes[point] for point in wanted]
    console.print(Counter((outcome.point.fault, outcome.plan) for outcome in done))
    bad = [outcome for outcome in done if outcome.problem or not outcome.identical]
    if not arguments.sample and not arguments.model and not arguments.fault:
        write_report(ROOT / "docs" / "sweep.md", done, calls, describe_machine())
    console.print(f"{len(done) - len(bad)} of {len(done)} points identical")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
