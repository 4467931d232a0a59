"""What snapshots cost a rank alone: trainings with and without them, in turns; the servers' time for them."""

import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from training_run import Training

Results = dict[str, Any]

TRAININGS = [
    Training("char_gpt.py", 1, 60, ["--log-every", "1000"]),
    Training("bench/workloads/launch_bound_mlp.py", 1, 12000),
]
OFF = ("--snapshot-overhead", "0")


def costs(rounds: int, share: float, folder: Path) -> list[Results]:
    """Per training: step times with over without snapshots, paired; share of the servers' time; bytes."""
    results = []
    for number, full in enumerate(TRAININGS):
        training = replace(full, steps=max(10, round(full.steps * share)))
        ratios, shares, reports = [], [], []
        for turn in range(rounds):
            place = folder / f"snapshots-{number}-{turn}"
            without = training.run(Path(f"{place}-off"), proxied=True, options=OFF)
            outcome = training.run(Path(f"{place}-on"), proxied=True)
            ratios.append(outcome.step_seconds / without.step_seconds)
            seconds = sum(outcome.seconds[0])
            shares.append(max(rank["snapshot_s"] for rank in outcome.report["ranks"]) / seconds)
            reports.append(outcome.report)
        results.append(
            {
                "script": Path(training.script).name,
                "ratio": statistics.median(ratios),
                "ratios": ratios,
                "share": statistics.median(shares),
                "snapshots": max(rank["snapshots"] for rank in reports[-1]["ranks"]),
                "bytes": max(rank["snapshot_bytes"] for rank in reports[-1]["ranks"]),
            }
        )
    return results


def rows(results: list[Results]) -> list[tuple[str, str, str]]:
    """For the table: what, measured, and more."""
    return [
        (
            f"snapshots: {row['script']}",
            f"{row['ratio']:.3f} x",
            f"on / off; {100 * row['share']:.2f} % of the server's time for {row['snapshots']} snapshots, "
            f"{row['bytes'] / 1e6:.1f} MB",
        )
        for row in results
    ]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="understudy-bench-") as name:
        for what in rows(costs(int(sys.argv[1]) if len(sys.argv) > 1 else 3, 1, Path(name))):
            print(*what, sep="  ")
