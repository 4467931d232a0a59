"""What `jit` costs while nothing fails: from the seconds of blocks of steps, with and without it in turns."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fault_plan import RANKS
from steady_plan import PAIRS, PATTERN
from training_run import ROOT, execute, installed

AIM = 0.001
"""Of a step, at most."""
SCRIPT = ROOT / "bench" / "jit" / "steady_steps.py"
MOST_S = 900.0
"""For all models."""
ROUNDS_S = 60.0
"""For the rounds of a model: on a machine that has other work there are fewer."""
NAMES = {
    "mlp": "perceptron, 3 layers",
    "gpt": "character GPT",
    "convolutions": "ResNet-50, an eighth as wide: 53 BatchNorms",
}


@dataclass(frozen=True)
class Spread:
    """Of some measurements."""

    median: float
    low: float
    """The 10th percentile."""
    high: float
    """The 90th percentile."""
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ValueError if there are none."""
        if not values:
            raise ValueError("nothing was measured")
        tenths = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else list(values)
        return cls(statistics.median(values), tenths[0], tenths[-1], len(values))


@dataclass(frozen=True)
class Cost:
    """Of one model; times in seconds."""

    model: str
    parameters: int
    step: float
    """The median without `jit`."""
    ratio: Spread
    """Of the medians of two blocks beside each other, with over without."""
    boundary: float
    """Inside `jit.boundary()`, in a step."""
    hooks: float
    """Inside hooks that PyTorch calls, in a step."""
    threads: float
    """Of the processors, for `jit`'s threads while a step takes its time."""

    @property
    def spent(self) -> float:
        """Seconds that `jit` itself was seen to spend in a step."""
        return self.boundary + self.hooks + self.threads

    @property
    def own(self) -> float:
        """The same, of a step."""
        return self.spent / self.step

    @property
    def enough(self) -> float:
        """Seconds of a step from which on `spent` is within the aim."""
        return self.spent / AIM

    @property
    def verdict(self) -> str:
        """Whether the aim is met: both measurements must say so."""
        if self.own > AIM:
            return "no"
        return "yes" if self.ratio.median <= 1 + AIM else "not shown"


def ratios_of(result: Mapping[str, Any]) -> list[float]:
    """Of the medians of two blocks beside each other, with over without. Raises ValueError."""
    blocks = result["blocks"]
    if not blocks or [block["kind"] for block in blocks] != [*PATTERN] * (len(blocks) // len(PATTERN)):
        raise ValueError(f"the blocks of {result['model']} are not whole rounds")
    medians = [statistics.median(block["seconds"]) for block in blocks]
    begins = range(0, len(blocks), len(PATTERN))
    return [medians[first + one] / medians[first + other] for first in begins for one, other in PAIRS]


def cost_of(result: Mapping[str, Any]) -> Cost:
    """Of what steady_steps.py wrote for a model. Raises ValueError."""
    blocks = result["blocks"]
    ratios = ratios_of(result)
    medians = [statistics.median(block["seconds"]) for block in blocks]
    without = [median for median, block in zip(medians, blocks, strict=True) if block["kind"] == "without"]
    timed = [block for block in blocks if block["kind"] == "timed"]
    used = [block for block in blocks if block["kind"] != "without"]
    step = statistics.median(without)
    return Cost(
        model=result["model"],
        parameters=result["parameters"],
        step=step,
        ratio=Spread.of(ratios),
        boundary=statistics.median(second for block in timed for second in block["boundary"]),
        hooks=statistics.median(second for block in timed for second in block["hooks"]),
        threads=sum(one["threads"] for one in used) / sum(one["whole"] for one in used) * step,
    )


def measure(models: Sequence[str], rounds: int, folder: Path) -> list[Cost]:
    """`models`: NAME:STEPS. Raises RunFailed."""
    return [cost_of(one) for one in run(models, rounds, folder)]


def run(models: Sequence[str], rounds: int, folder: Path) -> list[dict[str, Any]]:
    """What steady_steps.py writes of each of `models`: NAME:STEPS. Raises RunFailed."""
    folder.mkdir()
    command = [
        "env", f"TMPDIR={folder}", *installed("torchrun"), "--standalone", "--nproc-per-node", str(RANKS),
        str(SCRIPT), str(folder), "--rounds", str(rounds), "--seconds", str(ROUNDS_S),
    ]  # fmt: skip
    for model in models:
        command += ["--model", model]
    execute(command, MOST_S)
    found: list[dict[str, Any]] = json.loads((folder / "steady.json").read_text())
    return found
