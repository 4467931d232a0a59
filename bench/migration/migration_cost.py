"""`make bench-migration`: how long a rank stands still when it goes on elsewhere, and what each part takes.

    .venv/bin/python bench/migration/migration_cost.py [--brief | --quick] [--output FILE]

prints a table and writes bench/results/migration.json.  bench/README.md says how each number is taken.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from machine import ROOT, describe_machine
from migration_ways import PARTS, WAYS, Sample, Unavailable
from rich.table import Table
from training_run import RunFailed

from understudy.recovery.text.tables import make_console

Results = dict[str, Any]

AIM_S = 0.5
"""For a rank that is attached elsewhere on its host, copy and replay left out."""
FULL, BRIEF, QUICK = (3, 4), (2, 2), (1, 1)
"""Rounds, and events of each way in a round."""


def measure(rounds: int, count: int, folder: Path) -> list[Results]:
    """Of every way, in turns.  Raises RunFailed, also where losses differ in a single bit."""
    samples: dict[str, list[Sample]] = {name: [] for name in WAYS}
    missing: dict[str, str] = {}
    losses: list[list[str]] | None = None
    for turn in range(rounds):
        for number, (name, way) in enumerate(WAYS.items()):
            if name in missing:
                continue
            try:
                taken = way(count, folder / f"{turn}-{number}")
            except Unavailable as reason:
                missing[name] = str(reason)
                continue
            samples[name] += taken.samples
            if taken.losses:
                losses = losses or taken.losses
                if taken.losses != losses:
                    raise RunFailed(f"the losses differ after: {name}")
    return [summary(name, samples[name], missing.get(name, "")) for name in WAYS]


def summary(name: str, samples: list[Sample], missing: str) -> Results:
    """Medians of each part, and its share of the total."""
    if not samples:
        return {"way": name, "missing": missing}
    parts = {
        part: statistics.median(sample[part] for sample in samples) for part in PARTS if part in samples[0]
    }
    total = statistics.median(sample["total"] for sample in samples)
    fixed = statistics.median(
        sample["total"] - sample.get("copy", 0.0) - sample.get("replay", 0.0) for sample in samples
    )
    shares = {part: seconds / total for part, seconds in parts.items()}
    return {"way": name, "count": len(samples), "total_s": total, "fixed_s": fixed, "parts_s": parts,
            "shares": shares, "all": samples}  # fmt: skip


def table(results: list[Results]) -> Table:
    """For a person."""
    shown = Table(title="milliseconds, medians (share of the total)")
    shown.add_column("", overflow="fold")
    for heading in ("total", "without copy and replay", "parts", "of"):
        shown.add_column(heading)
    for row in results:
        if "missing" in row:
            shown.add_row(row["way"], row["missing"], "–", "–", "0")
            continue
        parts = ", ".join(
            f"{part} {1000 * seconds:.1f} ({100 * row['shares'][part]:.0f} %)"
            for part, seconds in row["parts_s"].items()
        )
        fixed = f"{1000 * row['fixed_s']:.1f}" if "copy" in row["parts_s"] else "–"
        shown.add_row(row["way"], f"{1000 * row['total_s']:.0f}", fixed, parts or "–", str(row["count"]))
    return shown


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--brief", action="store_true", help="two rounds of two events instead of three of four"
    )
    length.add_argument("--quick", action="store_true", help="a smoke run: the numbers mean nothing")
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "migration.json")
    options = parser.parse_args(arguments)
    rounds, count = QUICK if options.quick else BRIEF if options.brief else FULL
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="understudy-bench-") as folder:
        results = measure(rounds, count, Path(folder))
    make_console().print(table(results))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({"machine": machine, "aim_s": AIM_S, "results": results}, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
