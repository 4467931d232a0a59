"""What snapshots cost a training: its slowdown by interval, for others' ways and ours (PCcheck's Figure 8).

    .venv/bin/python bench/snapshots/training_slowdown.py [--brief] [--directory DIR]

prints tables and writes bench/results/slowdown.json, plots beside it, and slowdown_costs.json, from which
goodput.py computes.  README.md says how each number is taken.
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "workloads"))

import slowdown_report as report
from machine import ROOT, describe_machine
from rich.console import Console
from slowdown_costs import as_costs, restarts
from slowdown_measure import SWEEP, SWEEP_INTERVAL, Effort, Measurement, varied
from slowdown_plan import Row, Turn, row_of, with_longer
from training_run import RunFailed

from understudy.recovery.text.tables import make_console

INTERVALS = (1, 10, 25, 50, 100)
FULL = Effort(INTERVALS, 40, rounds=6, of_rounds=2, sweep_rounds=3, limit_s=3600)
BRIEF = Effort((1, SWEEP_INTERVAL), 20, rounds=4, of_rounds=4, sweep_rounds=1, limit_s=390)
QUICK = Effort(
    (1, 25), 200, rounds=1, of_rounds=1, sweep_rounds=0, limit_s=0, settle=200,
    ways=("torch.save", "PCcheck"), tiny=True,
)  # fmt: skip
QUIET_LOAD = 0.5


def options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--brief", action="store_true", help="8 minutes; intervals above 10 are not measured")
    length.add_argument("--quick", action="store_true", help="a smoke run: the numbers mean nothing")
    parser.add_argument("--minutes", type=float, help="of rounds and sweep, beside one round at least")
    parser.add_argument("--directory", type=Path, default=ROOT / "build", help="on the disk to measure")
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "slowdown.json")
    return parser.parse_args(arguments)


def measure(effort: Effort, directory: Path, console: Console) -> tuple[Row, Row]:
    """Results and costs.  Raises RunFailed."""
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="understudy-bench-", dir=directory) as name:
        folder = Path(name)
        with console.status("") as status:

            def tell(what: str) -> None:
                status.update(what)
                if not console.is_terminal:
                    console.print(what, markup=False, highlight=False)

            measurement = Measurement(effort, folder, tell)
            measurement.rounds()
            measurement.sweep()
            footprint = measurement.footprint()
            tell("restarts")
            ours = restarts(folder, effort.tiny)
    rows = rows_of(measurement.turns, effort)
    busy = f" (BUSY: load {machine['load_before']:.1f} before)" if machine["load_before"] > QUIET_LOAD else ""  # type: ignore[operator]
    natives = measurement.natives
    title = f"understudy {machine['commit']}, {machine['cpu']}{busy}"
    results: Row = {
        "title": title, "machine": machine, "load_after": os.getloadavg()[0], "effort": asdict(effort),
        "state_bytes": next(one.state_bytes for runs in natives.values() for one in runs),
        "rows": rows, "sweep": sweep_rows(measurement), "footprint": footprint, "restarts": asdict(ours),
        "proxied_over_native": measurement.proxied_over_native, "verdicts": report.verdicts(rows),
        "turns": [asdict(turn) for turn in measurement.turns],
        "sweep_turns": [asdict(point) | asdict(turn) for point, turn in measurement.swept],
    }  # fmt: skip
    origin = f"training_slowdown.py, {machine['date']}, {title}; one device, state of "
    origin += f"{results['state_bytes'] / 1e6:.0f} MB"
    return results, as_costs(rows, natives, ours, origin)


def rows_of(turns: list[Turn], effort: Effort) -> list[Row]:
    """Per way and interval."""
    together: dict[tuple[str, int], list[Turn]] = {}
    for turn in turns:
        together.setdefault((turn.way, turn.interval), []).append(turn)
    return with_longer([row_of(found) for found in together.values()], INTERVALS)


def sweep_rows(measurement: Measurement) -> list[Row]:
    """Per thing varied and value."""
    rows = []
    for name, points in SWEEP.items():
        for point in points:
            if turns := [turn for at, turn in measurement.swept if at == point]:
                rows.append({"varied": name, "value": varied(name, point)} | row_of(turns))
    return rows


def show(results: Row, console: Console) -> None:
    console.print(results["title"], markup=False)
    console.print(report.slowdown_table(results["rows"]))
    if results["sweep"]:
        console.print(report.sweep_table(results["sweep"]))
    console.print(report.footprint_table(results["footprint"], results["state_bytes"]))
    console.print(report.verdict_table(results["verdicts"]))
    restarted = ", ".join(f"{name[:-2]} {seconds:.2f} s" for name, seconds in results["restarts"].items())
    console.print(f"understudy's restarts: {restarted}")


def main(arguments: list[str] | None = None) -> int:
    """Entry point; the exit status."""
    given = options(arguments)
    given.directory.mkdir(parents=True, exist_ok=True)
    effort = QUICK if given.quick else BRIEF if given.brief else FULL
    if given.minutes is not None:
        effort = replace(effort, limit_s=60 * given.minutes)
    console = make_console()
    try:
        results, costs = measure(effort, given.directory.absolute(), console)
    except RunFailed as failure:
        console.print(failure, style="red", markup=False, highlight=False)
        return 1
    show(results, console)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(results, indent=1) + "\n")
    costs_path = given.output.with_name(f"{given.output.stem}_costs.json")
    costs_path.write_text(json.dumps(costs, indent=1) + "\n")
    for path in (given.output, costs_path, *report.draw(results, given.output.parent, given.output.stem)):
        console.print(f"written to {path}")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
