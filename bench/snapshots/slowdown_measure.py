"""Rounds of trainings with and without snapshots, in random order, within a time."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from baseline_training import BASELINES
from slowdown_plan import Row, Segment, Turn, intermingled, whole_intervals
from slowdown_runs import Native, Proxied, native, proxied

OURS, OURS_NATIVE = "understudy", "understudy, against native"
SWEEP_INTERVAL = 10
WARM_NATIVE = 3
"""Steps before those that are measured."""
WARM_SETS = 3
"""Snapshots of ours before those that are measured: each place of its memory and storage was written once."""
SHARE_OF_SWEEP = 0.3


@dataclass(frozen=True)
class Point:
    """Options of proxyd; these are its defaults."""

    interval: int
    slots: int = 3
    threads: int = 2
    chunk_mib: int = 4
    memory_mib: int = 64

    @property
    def options(self) -> tuple[str, ...]:
        """As words of its command line."""
        return (
            "--persist-slots", str(self.slots), "--persist-threads", str(self.threads),
            "--persist-chunk", f"{self.chunk_mib}MiB", "--persist-memory", f"{self.memory_mib}MiB",
        )  # fmt: skip


BASE = Point(SWEEP_INTERVAL)
SWEEP = {
    "snapshots at a time, every step": [Point(1, slots=n + 1) for n in (1, 2, 3)],
    "snapshots at a time": [replace(BASE, slots=n + 1) for n in (1, 2, 3)],
    "threads": [replace(BASE, threads=threads) for threads in (1, 2, 4)],
    "MiB per chunk": [replace(BASE, chunk_mib=chunk) for chunk in (1, 4, 16)],
    "MiB of memory": [replace(BASE, memory_mib=memory) for memory in (8, 64, 256)],
}
"""What is varied at a time (Figures 12 to 14)."""


def varied(name: str, point: Point) -> int:
    """The value of it."""
    values = {"threads": point.threads, "MiB per chunk": point.chunk_mib, "MiB of memory": point.memory_mib}
    return values.get(name, point.slots - 1)


@dataclass(frozen=True)
class Effort:
    """What to measure, and how often."""

    measured: Sequence[int]
    """Intervals; what longer ones cost follows from the longest."""
    least_steps: int
    """Per measurement; at an interval of 1, a third of them."""
    rounds: int
    of_rounds: int
    """Each of the others' ways has its turn in one of so many rounds."""
    sweep_rounds: int
    limit_s: float
    """Of the rounds and the sweep; none begins that would probably end after it."""
    settle: int = 6
    """Steps of ours before those that are measured, at least, and behind them."""
    ways: Sequence[str] = tuple(BASELINES)
    tiny: bool = False


class Measurement:
    """Of all ways."""

    def __init__(self, effort: Effort, folder: Path, tell: Callable[[str], object]) -> None:
        self.turns: list[Turn] = []
        self.swept: list[tuple[Point, Turn]] = []
        self.natives: dict[str, list[Native]] = {}
        self.proxied_over_native: list[float] = []
        """A step of ours without persistence, by round."""
        self._effort, self._folder, self._tell = effort, folder, tell
        self._begin_s = time.monotonic()
        self._count = 0

    def rounds(self) -> None:
        """As many as there is time for.  Each way has one turn at least, and ours.  Raises RunFailed."""
        effort = self._effort
        ways = random.sample(effort.ways, len(effort.ways))
        until_s = effort.limit_s * (1 - SHARE_OF_SWEEP if effort.sweep_rounds else 1)
        longest_s = 0.0
        for number in range(effort.rounds):
            begin_s = self._passed_s()
            is_late = number > 0 and begin_s + longest_s > until_s
            if is_late and number >= effort.of_rounds:
                break
            ours = () if is_late else (0, *effort.measured)
            label = f"round {number + 1} of {effort.rounds}"
            self._round(label, ways[number % effort.of_rounds :: effort.of_rounds], ours)
            longest_s = max(longest_s, self._passed_s() - begin_s)

    def sweep(self) -> None:
        """Each point beside a run without persistence, as often as there is time.  Raises RunFailed."""
        points = list(dict.fromkeys(point for points in SWEEP.values() for point in points))
        for number in range(self._effort.sweep_rounds):
            label = f"sweep {number + 1} of {self._effort.sweep_rounds}"
            plain = self._ours(self._segment(0, 2 * SWEEP_INTERVAL), f"{label}: without snapshots")
            for point in random.sample(points, len(points)):
                if self._passed_s() > self._effort.limit_s:
                    return
                segment = self._segment(point.interval, 2 * SWEEP_INTERVAL)
                run = self._ours(segment, f"{label}: {point}", point.options)
                self.swept.append((point, run.turn(OURS, plain)))

    def footprint(self) -> Row:
        """Peaks of a run with a snapshot at every step, which is not timed.  Raises RunFailed."""
        run = self._ours(
            self._segment(1, self._effort.least_steps), "memory and storage", (), watch_memory=True
        )
        assert run.footprint is not None
        written = max((one.bytes for one in run.durable), default=0)
        return asdict(run.footprint) | {"written_bytes": written, "in_flight": BASE.slots - 1}

    def _round(self, label: str, ways: Sequence[str], intervals: Sequence[int]) -> None:
        ours: dict[int, Proxied] = {}
        beside: list[float] = []
        tasks: list[Callable[[], None]] = [partial(self._native, label, way, beside) for way in ways]
        tasks += [partial(self._interval, label, interval, ours) for interval in intervals]
        for task in random.sample(tasks, len(tasks)):
            task()
        if not ours:
            return
        plain_s = statistics.median(beside)
        for interval in self._effort.measured:
            turn = ours[interval].turn(OURS, ours[0])
            self.turns += [turn, replace(turn, way=OURS_NATIVE, plain_s=plain_s)]
        self.proxied_over_native.append(ours[0].step_s / plain_s)

    def _native(self, label: str, way: str, beside: list[float]) -> None:
        self._tell(f"{label}: {way}")
        least = self._effort.least_steps
        segments = [
            Segment(interval, WARM_NATIVE, least // 3)
            if interval == 1
            else Segment(interval, 0, whole_intervals(interval, least))
            for interval in self._effort.measured
        ]
        plain = Segment(0, 1, max(3, least // 3))
        found = native(way, intermingled(segments, plain), self._new_folder(), self._effort.tiny)
        self.natives.setdefault(way, []).append(found)
        self.turns += found.turns
        beside += found.plain_s

    def _interval(self, label: str, interval: int, ours: dict[int, Proxied]) -> None:
        what = f"{OURS}, every {interval}" if interval else "proxied, without snapshots"
        ours[interval] = self._ours(self._segment(interval, self._effort.least_steps), f"{label}: {what}")

    def _ours(
        self, segment: Segment, label: str, options: tuple[str, ...] = (), watch_memory: bool = False
    ) -> Proxied:
        self._tell(label)
        return proxied(segment, self._new_folder(), self._effort.tiny, options, watch_memory)

    def _segment(self, interval: int, least_steps: int) -> Segment:
        """Of ours."""
        settle = self._effort.settle
        if not interval:
            return Segment(0, settle, least_steps)
        warm = whole_intervals(interval, max(settle, WARM_SETS * min(interval, SWEEP_INTERVAL)))
        return Segment(interval, warm, whole_intervals(interval, least_steps), settle)

    def _new_folder(self) -> Path:
        self._count += 1
        return self._folder / str(self._count)

    def _passed_s(self) -> float:
        return time.monotonic() - self._begin_s
