"""How fast faults are noticed and recovered from: medians over many of each kind, split into parts."""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training_run import RunFailed, Training

Results = dict[str, Any]
PARTS = ("detect_s", "restart_s", "copy_s", "communicators_s", "replay_s", "total_s")
SCRIPT = "char_gpt.py"
EVERY = 6
"""Minibatches from one fault to the next."""


@dataclass(frozen=True)
class Goal:
    """For one kind of fault, in seconds.  `rest`: of a recovery, replay and copy left out."""

    detect: float
    rest: float


GOALS = {
    "kill-server": Goal(detect=0.05, rest=0.3),
    "stop-server": Goal(detect=1.0, rest=0.3),
    "call-error": Goal(detect=0.05, rest=0.1),
}


def of_fault(fault: str, count: int, calls_per_step: int, folder: Path, ranks: int = 2) -> Results:
    """`count` faults in one run, at places spread over the minibatch.  Raises RunFailed."""
    drills = tuple(
        f"{fault} rank={(i - 1) % ranks} step={EVERY * i} call={max(1, calls_per_step * i // (count + 1))}"
        for i in range(1, count + 1)
    )
    training = Training(SCRIPT, ranks, EVERY * (count + 1), ["--log-every", "1000"])
    found = training.run(folder / f"{fault}-{ranks}", proxied=True, drills=drills).report["recoveries"]
    if len(found) < count or not all(entry["recovered"] for entry in found):
        raise RunFailed(f"{fault}: {len(found)} of {count} faults were recovered from")
    medians = {part: statistics.median(entry[part] for entry in found) for part in PARTS}
    rest = statistics.median(
        entry["restart_s"] + entry["communicators_s"] for entry in found
    )  # what is neither noticing nor proportional to bytes or calls
    plans = sorted({entry["plan"] for entry in found})
    without_replay = statistics.median(entry["total_s"] - entry["replay_s"] for entry in found)
    return {
        "fault": fault, "count": len(found), "plans": plans, **medians, "rest_s": rest,
        "without_replay_s": without_replay, "all": found,
    }  # fmt: skip


def measure(count: int, calls_per_step: int, folder: Path) -> list[Results]:
    """Of every kind that has a goal."""
    return [of_fault(fault, count, calls_per_step, folder) for fault in GOALS]


def alone(count: int, calls_per_step: int, folder: Path) -> Results:
    """A rank without peers, whose server is killed."""
    return of_fault("kill-server", count, calls_per_step, folder, ranks=1)


def rows(results: list[Results]) -> list[tuple[str, str, str]]:
    """For the table: what, measured, and more."""
    found = []
    for row in results:
        goal = GOALS[row["fault"]]
        parts = ", ".join(f"{part.removesuffix('_s')} {1000 * row[part]:.1f}" for part in PARTS[1:-1])
        found += [
            (f"{row['fault']}: noticed after", f"{1000 * row['detect_s']:.1f} ms",
             f"goal {1000 * goal.detect:.0f}; median of {row['count']}"),
            (f"{row['fault']}: {' or '.join(row['plans'])}", f"{1000 * row['total_s']:.1f} ms", parts),
            ("   without noticing, copy and replay", f"{1000 * row['rest_s']:.1f} ms",
             f"goal {1000 * goal.rest:.0f}"),
        ]  # fmt: skip
    return found
