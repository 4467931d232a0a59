"""How long to train to see what snapshots cost, and what follows from it.  Pure."""

from __future__ import annotations

import math
import os
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Segment:
    """Steps of a training with a snapshot every `interval` of them; 0: without."""

    interval: int
    warm: int
    """Steps before those that are measured."""
    steps: int
    """That are measured: whole intervals."""
    tail: int = 0
    """Behind them: in which their last snapshot becomes durable."""


@dataclass(frozen=True)
class Turn:
    """What a segment took, beside steps of the same round without snapshots."""

    way: str
    interval: int
    steps: int
    step_s: float
    """Mean over the segment, stalls included."""
    plain_s: float
    """The same without snapshots."""
    processor_s: float
    """Of all processes that take part, per step."""
    plain_processor_s: float
    durable: int
    """Snapshots of these steps that became durable."""
    durable_s: tuple[float, ...]
    """From the end of its step until it was; of those."""

    @property
    def processor(self) -> float:
        """Processors' time with over without; it is counted in ticks."""
        return self.processor_s / max(self.plain_processor_s, TICK_S / self.steps)

    @property
    def saturated(self) -> bool:
        """Whether the next was due before one was durable, so that waiting for it is part of the cost."""
        return not self.durable_s or max(self.durable_s) > self.interval * self.plain_s


def spelled(segments: Iterable[Segment]) -> str:
    """As a word of a command line."""
    return ",".join(f"{one.interval}:{one.warm}:{one.steps}:{one.tail}" for one in segments)


def parsed(text: str) -> list[Segment]:
    """What spelled() gave; raises ValueError."""
    return [Segment(*map(int, word.split(":"))) for word in text.split(",")]


def intermingled(segments: Sequence[Segment], plain: Segment) -> list[Segment]:
    """In random order, each between steps without snapshots."""
    shuffled = random.sample(list(segments), len(segments))
    return [plain, *(one for segment in shuffled for one in (segment, plain))]


def row_of(turns: Sequence[Turn]) -> Row:
    """Medians over rounds of one way at one interval; a ratio is the median of the rounds' ratios."""
    one = turns[0]
    durable_s = [seconds for turn in turns for seconds in turn.durable_s]
    return {
        "way": one.way,
        "interval": one.interval,
        "slowdown": statistics.median(turn.step_s / turn.plain_s for turn in turns),
        "slowdowns": [turn.step_s / turn.plain_s for turn in turns],
        "step_s": statistics.median(turn.step_s for turn in turns),
        "plain_s": statistics.median(turn.plain_s for turn in turns),
        "processor": statistics.median(turn.processor for turn in turns),
        "due": sum(turn.steps // turn.interval for turn in turns),
        "durable": sum(turn.durable for turn in turns),
        "durable_s": statistics.median(durable_s) if durable_s else None,
        "saturated": any(turn.saturated for turn in turns),
        "from_interval": None,
    }


def with_longer(rows: Sequence[Row], intervals: Iterable[int]) -> list[Row]:
    """And rows for intervals that were not measured: one snapshot costs what it cost at the longest that was.

    Only where it was durable before the next was due: otherwise waiting is part of the cost, and there is no
    row.
    """
    found = list(rows)
    for way in dict.fromkeys(row["way"] for row in rows):
        longest = max((row for row in rows if row["way"] == way), key=lambda row: row["interval"])
        for interval in sorted(intervals):
            if interval > longest["interval"] and not longest["saturated"]:
                found.append(longest | _spread(longest, interval))
    return found


def _spread(row: Row, interval: int) -> Row:
    share = row["interval"] / interval
    slowdown = 1 + (row["slowdown"] - 1) * share
    return {
        "interval": interval,
        "slowdown": slowdown,
        "slowdowns": [1 + (one - 1) * share for one in row["slowdowns"]],
        "step_s": row["plain_s"] * slowdown,
        "processor": 1 + (row["processor"] - 1) * share,
        "due": 0,
        "durable": 0,
        "from_interval": row["interval"],
    }


def whole_intervals(interval: int, least: int) -> int:
    """Steps: as few intervals as have `least` steps."""
    return interval * math.ceil(least / interval)


def by_way(rows: Sequence[Row]) -> Mapping[str, Mapping[int, Row]]:
    """Way -> interval -> row."""
    ways: dict[str, dict[int, Row]] = {}
    for row in rows:
        ways.setdefault(row["way"], {})[row["interval"]] = row
    return ways
