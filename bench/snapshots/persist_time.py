"""`make bench-snapshots`: how long until a state is durable, beside others' ways, and how fast it comes back.

    .venv/bin/python bench/snapshots/persist_time.py [--brief] [--directory DIR]

prints tables and writes bench/results/snapshots.json and plots beside it.  Its files, at most 4 GiB at a
time, lie in a new folder of DIR (the repository's build folder) and are removed.  README.md says how each
number is taken.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import persist_report as report
from machine import ROOT, describe_machine
from persist_measure import Effort, Row, persist_times
from persist_sweeps import sensitivity, several_at_a_time
from persist_ways import one_rank
from restore_measure import restore_times
from rich.console import Console

from understudy.recovery.text.tables import make_console

SIZES = (16, 64, 256, 500)
FULL = Effort(SIZES, rounds=11, sweep_megabytes=256, sweep_rounds=9, limit_s=120)
BRIEF = Effort(SIZES, rounds=5, sweep_megabytes=128, sweep_rounds=5, limit_s=40)
QUICK = Effort((1,), rounds=1, sweep_megabytes=1, sweep_rounds=1, limit_s=0, chunks_mib=(1,), threads=(1,))
QUIET_LOAD = 0.5


def options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--brief", action="store_true", help="five rounds instead of eleven")
    length.add_argument("--quick", action="store_true", help="a smoke run: the numbers mean nothing")
    parser.add_argument("--directory", type=Path, default=ROOT / "build", help="on the disk to measure")
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "snapshots.json")
    return parser.parse_args(arguments)


def kind_of_file_system(folder: Path) -> str:
    command = ["stat", "-f", "-c", "%T", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def measure(effort: Effort, directory: Path, console: Console) -> Row:
    machine = describe_machine()
    busy = float(machine["load_before"]) > QUIET_LOAD
    file_system = kind_of_file_system(directory)
    with (
        tempfile.TemporaryDirectory(prefix="understudy-bench-", dir=directory) as name,
        console.status("") as status,
        one_rank(),
    ):
        folder = Path(name)
        saved, footprints = persist_times(effort, folder, status.update)
        results: Row = {
            "machine": machine,
            "busy": busy,
            "file_system": file_system,
            "effort": asdict(effort),
            "saved": saved,
            "footprints": footprints,
            "sensitivity": sensitivity(effort, folder, status.update),
            "several": several_at_a_time(effort, folder, status.update),
            "restored": restore_times(effort, folder, status.update),
        }
    results["load_after"] = os.getloadavg()[0]
    results["verdicts"] = report.verdicts(results["saved"], results["restored"])
    load = f" (BUSY: load {machine['load_before']:.1f} before)" if busy else ""
    results["title"] = f"understudy {machine['commit']}, {machine['cpu']}, {file_system}{load}"
    return results


def show(results: Row, console: Console) -> None:
    console.print(results["title"], markup=False)
    console.print(report.times_table(results["saved"], "until durable", blocked=True))
    console.print(report.times_table(results["restored"], "until read back, nothing cached", blocked=False))
    console.print(report.sensitivity_table(results["sensitivity"]))
    console.print(report.several_table(results["several"]))
    console.print(report.footprint_table(results["footprints"]))
    console.print(report.verdict_table(results["verdicts"]))


def main(arguments: list[str] | None = None) -> int:
    """Entry point; the exit status."""
    given = options(arguments)
    given.directory.mkdir(parents=True, exist_ok=True)
    effort = QUICK if given.quick else BRIEF if given.brief else FULL
    console = make_console()
    results = measure(effort, given.directory, console)
    show(results, console)
    if results["file_system"] == "tmpfs":
        console.print("This folder is memory: nothing about a disk was measured.", style="yellow")
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(results, indent=1) + "\n")
    for path in (given.output, *report.draw(results, given.output.parent, given.output.stem)):
        console.print(f"written to {path}")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
