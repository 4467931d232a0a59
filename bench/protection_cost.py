"""What snapshots, shadows and validations cost together at two ranks: with and without them, in turns.

Two ranks keep two cores busy with four processes: a step takes as long as the scheduler likes, one by a tenth
or more longer than the next, while the processors' time that all of them need for it is steady.  So that is
what is compared; wall-clock times are in the JSON.
"""

import contextlib
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from running_proxyd import running_proxyd
from training_run import WARMUP_STEPS, RunFailed, Training

Results = dict[str, Any]

LOOK_EVERY = 10
TRAINING = Training("char_gpt.py", 2, 150, ["--log-every", str(LOOK_EVERY)])
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

"rolled": a commit before each optimizer step, and no pre-images in it (recovery/planning/roll_forward.py).
"""
GOAL = 0.02


class Meter:
    """Processors' seconds of a step: what servers and workers use from one mark to the last."""

    def __init__(self, proxyd: int) -> None:
        self._proxyd = proxyd
        self._marks: list[tuple[int, float]] = []

    def look(self, step: int) -> None:
        """At the end of a step that the script tells of; the first is warm-up."""
        ours = [psutil.Process(self._proxyd), psutil.Process()]  # servers are below it, workers below us
        processes = {child for process in ours for child in process.children(recursive=True)}
        used = 0.0
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                used += times.user + times.system
        self._marks.append((step, used))

    def per_step(self) -> float:
        """Seconds.  Raises RunFailed if the script told of fewer than two steps."""
        if len(self._marks) < 2:
            raise RunFailed("a training that is too short to be measured")
        (first, before), (last, after) = self._marks[0], self._marks[-1]
        return (after - before) / (last - first)


def costs(rounds: int, share: float, folder: Path) -> Results:
    """Shares of a step: of snapshots and shadows, of a validation every `USUALLY` steps, and both."""
    training = replace(TRAINING, steps=max(5 * LOOK_EVERY, round(TRAINING.steps * share)))
    wall: dict[str, list[float]] = {arm: [] for arm in ARMS}
    used: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for turn in range(rounds):
        for arm, options in ARMS.items():
            place = folder / f"protection-{turn}-{arm}"
            with running_proxyd(Path(f"{place}.sock"), training.ranks, options) as proxyd:
                meter = Meter(proxyd.pid)
                outcome = training.run(
                    place, proxied=True, options=("--socket", str(proxyd.socket)), on_step=meter.look
                )
            wall[arm].append(statistics.fmean(outcome.seconds[0][WARMUP_STEPS:]))
            used[arm].append(meter.per_step())
    turns = [dict(zip(used, turn, strict=True)) for turn in zip(*used.values(), strict=True)]
    kept = statistics.median(turn["with"] / turn["without"] - 1 for turn in turns)
    validated = statistics.median((turn["validated"] / turn["with"] - 1) * OFTEN / USUALLY for turn in turns)
    rolled = statistics.median(turn["rolled"] / turn["with"] - 1 for turn in turns)
    return {"steps": training.steps, "processor_s": used, "wall_s": wall, "kept": kept,
            "validated": validated, "together": kept + validated, "rolled": rolled}  # fmt: skip


def rows(results: Results) -> list[tuple[str, str, str]]:
    """For the table: what, measured, and more."""
    return [
        (
            "snapshots + shadows + validation",
            f"{100 * results['together']:+.2f} %",
            f"goal {100 * GOAL:.0f} %; of the processors' time for a step of char_gpt.py, 2 ranks, on / off "
            f"in turns; "
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
