"""What snapshots, shadows and validations cost together at two ranks: with and without them, in turns."""

import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from running_proxyd import running_proxyd
from training_run import WARMUP_STEPS, Outcome, Training

Results = dict[str, Any]

TRAINING = Training("char_gpt.py", 2, 150, ["--log-every", "1000"])
OFTEN = 10
"""Minibatches from one validation to the next where their cost is measured."""
USUALLY = 1000
ARMS = {
    "without": ("--snapshot-overhead", "0", "--validate-every", "0", "--shadow-limit", "64KiB"),
    "with": ("--validate-every", "0"),
    "validated": ("--validate-every", str(OFTEN)),
    "rolled": ("--validate-every", "0", "--optimizer-preimages", "off"),
}
"""Options of proxyd.  No shadow fits into so little; digests and pre-images are kept all the same.

"rolled": a commit before each optimizer step, and no pre-images in it (see recovery/roll_forward.py).
"""
GOAL = 0.02


def mean_step(outcome: Outcome) -> float:
    """Seconds, warm-up left out; the mean, as snapshots and validations fall on few steps."""
    return statistics.fmean(outcome.seconds[0][WARMUP_STEPS:])


def costs(rounds: int, share: float, folder: Path) -> Results:
    """Shares of the step time: of snapshots and shadows, of a validation every `USUALLY` steps, and both."""
    training = replace(TRAINING, steps=max(2 * OFTEN, round(TRAINING.steps * share)))
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for turn in range(rounds):
        for arm, options in ARMS.items():
            place = folder / f"protection-{turn}-{arm}"
            with running_proxyd(Path(f"{place}.sock"), training.ranks, options) as proxyd:
                outcome = training.run(place, proxied=True, options=("--socket", str(proxyd.socket)))
            seconds[arm].append(mean_step(outcome))
    rows = [dict(zip(seconds, turn, strict=True)) for turn in zip(*seconds.values(), strict=True)]
    kept = statistics.median(row["with"] / row["without"] - 1 for row in rows)
    validated = statistics.median((row["validated"] / row["with"] - 1) * OFTEN / USUALLY for row in rows)
    rolled = statistics.median(row["rolled"] / row["with"] - 1 for row in rows)
    return {"steps": training.steps, "seconds": seconds, "kept": kept, "validated": validated,
            "together": kept + validated, "rolled": rolled}  # fmt: skip


def rows(results: Results) -> list[tuple[str, str, str]]:
    """For the table: what, measured, and more."""
    return [
        (
            "snapshots + shadows + validation",
            f"{100 * results['together']:+.2f} %",
            f"goal {100 * GOAL:.0f} %; of the mean step of char_gpt.py, 2 ranks, on / off in turns; "
            f"validation (every {USUALLY}) {100 * results['validated']:+.2f} %",
        ),
        (
            "two commits a step instead of pre-images in it",
            f"{100 * results['rolled']:+.2f} %",
            "--optimizer-preimages off against on, likewise",
        ),
    ]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="understudy-bench-") as name:
        for what in rows(costs(int(sys.argv[1]) if len(sys.argv) > 1 else 3, 1, Path(name))):
            print(*what, sep="  ")
