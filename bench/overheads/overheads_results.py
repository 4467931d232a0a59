"""What `make bench-overheads` measured, as it lies in bench/results/overheads.json, and what follows.  Pure.

Paper 001's Table 3 has percentages of the time that ways of recovering take while nothing fails: of periodic
checkpoints c* o (eq. 3; the first term of eq. 5) with N each job's own GPUs, of one checkpoint a day o over
a day, of just-in-time checkpoints what they add to a minibatch.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "jit"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from steady_cost import Spread

from understudy.campaigns.report.statistics import Estimate, estimate
from understudy.recovery.costs.given import paper
from understudy.recovery.costs.models.formulas import optimal_frequency

DISK, MEMORY, CHECKFREQ = "PC_disk", "PC_mem", "CheckFreq"
PERIODIC = (DISK, MEMORY, CHECKFREQ)
SIZES = (2, 1024)
"""N: of the least job that has a replica, as those that were measured with `jit`; and a large one."""


@dataclass(frozen=True)
class Stall:
    """Of one checkpoint in one round; seconds."""

    held: float
    """The training stood still."""
    slower: float
    """By how much its steps took longer until all was written, beside the blocks around; noise may be
    negative.  0 of a way that has nothing left to do when it returns."""

    @property
    def whole(self) -> float:
        """o of §5.2."""
        return self.held + self.slower


@dataclass(frozen=True)
class Jit:
    """Two ranks with `understudy.jit`, and without."""

    minibatch: float
    """Seconds, without."""
    ratios: Sequence[float]
    """With over without, of blocks beside each other."""
    own: float
    """Seconds that its own code was seen to spend in a minibatch."""


@dataclass(frozen=True)
class Ours:
    """One rank under `proxyrun`: per round."""

    native: Sequence[float]
    """Seconds of a minibatch, natively."""
    proxied: Sequence[float]
    """Under the proxy, with all that is on by itself."""
    persisted: Sequence[float]
    """... and with `--persist`."""
    interval: Sequence[float]
    """Minibatches for each snapshot that became durable."""

    @property
    def percents(self) -> list[float]:
        """What the proxy adds to a minibatch."""
        return [100 * (one / other - 1) for one, other in zip(self.proxied, self.native, strict=True)]

    @property
    def snapshots(self) -> list[float]:
        """o of a snapshot on storage, seconds; noise may be negative."""
        rounds = zip(self.persisted, self.proxied, self.interval, strict=True)
        return [(one - other) * interval for one, other, interval in rounds]


@dataclass(frozen=True)
class Model:
    """All of one model."""

    name: str
    parameters: int
    state_bytes: int
    minibatch: Sequence[float]
    """Seconds, natively, one rank: of each round."""
    stalls: Mapping[str, Sequence[Stall]]
    """Of each of PERIODIC, one a round."""
    jit: Jit
    ours: Ours

    def checkpoint(self, way: str) -> Spread:
        """o."""
        return Spread.of([one.whole for one in self.stalls[way]])

    def held(self, way: str) -> float:
        """The median."""
        return statistics.median(one.held for one in self.stalls[way])

    def least_checkpoint(self, way: str) -> float:
        """o that is reckoned with: the median, and never less than the training was seen to stand still."""
        return max(self.checkpoint(way).median, self.held(way))

    @property
    def snapshot(self) -> float:
        """o of ours on storage that is reckoned with; 0 where its steps were not the slower ones."""
        return max(0.0, statistics.median(self.ours.snapshots))

    @property
    def jit_percent(self) -> Estimate:
        """What `jit` adds to a minibatch, from pairs."""
        return estimate([100 * (ratio - 1) for ratio in self.jit.ratios])

    @property
    def ours_percent(self) -> Estimate:
        """What the proxy adds to a minibatch, from rounds."""
        return estimate(self.ours.percents)

    @property
    def snapshot_seconds(self) -> Estimate:
        """What a snapshot on storage adds, from rounds."""
        return estimate(self.ours.snapshots)


@dataclass(frozen=True)
class Results:
    """Of all models; the machine before the run, and `load_after`."""

    machine: Mapping[str, Any]
    command: str
    seed: int
    took: float
    models: Sequence[Model]

    def write(self, path: Path) -> None:
        """As JSON.  Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Results:
        """Raises OSError, ValueError, TypeError, KeyError and AttributeError for what `write` did not."""
        fields = json.loads(path.read_text())
        fields["models"] = [
            Model(
                **model
                | {
                    "stalls": {
                        way: [Stall(**one) for one in stalls] for way, stalls in model["stalls"].items()
                    },
                    "jit": Jit(**model["jit"]),
                    "ours": Ours(**model["ours"]),
                }
            )
            for model in fields["models"]
        ]
        return cls(**fields)


# ------------------------------------------------------------------ Table 3
def optimal_percent(checkpoint: float, gpus: float) -> float:
    """c* o, in percent of useful time, with f of §6.5; `checkpoint`: o, seconds.  0 for no seconds."""
    if checkpoint == 0:
        return 0.0
    return 100 * optimal_frequency(gpus, paper.FAILURE_RATE, checkpoint) * checkpoint


def hours_between(checkpoint: float, gpus: float) -> float:
    """1/c*: from one checkpoint to the next."""
    return 1 / (3600 * optimal_frequency(gpus, paper.FAILURE_RATE, checkpoint))


def daily_percent(checkpoint: float) -> float:
    """PC_1/day: o, over a day, in percent."""
    return 100 * checkpoint / paper.SECONDS_PER_DAY


# ------------------------------------------------------------------ from blocks
def stalls_of(
    rounds: Sequence[Sequence[Mapping[str, Any]]], overlaps: Mapping[str, bool]
) -> dict[str, list[Stall]]:
    """Of each way, from blocks as periodic_training.py writes them: each way's lies between two without.

    `overlaps`: whether a way goes on behind the call.  Raises ValueError for other blocks.
    """
    found: dict[str, list[Stall]] = {way: [] for way in overlaps}
    for blocks in rounds:
        ways = [block["way"] for block in blocks[1::2]]
        if any(block["way"] is not None for block in blocks[::2]) or sorted(ways) != sorted(overlaps):
            raise ValueError("a round must have each way once, between blocks without checkpoints")
        for place in range(1, len(blocks), 2):
            one, around = blocks[place], [*blocks[place - 1]["steps"], *blocks[place + 1]["steps"]]
            longer = sum(one["steps"]) - len(one["steps"]) * statistics.fmean(around)
            found[one["way"]].append(Stall(one["held"], longer if overlaps[one["way"]] else 0.0))
    return found


def minibatches_of(rounds: Sequence[Sequence[Mapping[str, Any]]]) -> list[float]:
    """Median seconds of a step without checkpoints, in each round."""
    return [statistics.median(step for block in blocks[::2] for step in block["steps"]) for blocks in rounds]
