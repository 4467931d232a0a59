"""How fast a running job trains and how much it holds, seen from outside: from looks at proxyd's status."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from understudy.recovery.base.errors import BadInput

PERIOD_S = 0.05
"""Between two looks: what a step time may be wrong by, over the whole watch."""
CHANGES = 3
"""Changes of the step that every rank must show, so that two whole spans lie between them."""
PATIENCE = 12
"""So many times as long a watch goes on for a job whose steps take longer."""


@dataclass(frozen=True)
class RankSample:
    """What one rank showed at one look."""

    step: int
    live_bytes: int
    running: bool = True
    """False while it recovers: its step stands still then."""


@dataclass(frozen=True)
class Sample:
    """One look; `ranks` is empty once the job has ended."""

    at_s: float
    ranks: Mapping[int, RankSample]


def name_of_job(status: Any, wanted: str) -> str:
    """The job to watch; empty if none runs.  Raises BadInput where that is not clear."""
    jobs = sorted({rank.job for rank in status.ranks})
    if wanted and wanted not in jobs:
        raise BadInput(
            f"--job {wanted!r} does not run" + (f": {', '.join(jobs)} do" if jobs else ": no job does")
        )
    if not wanted and len(jobs) > 1:
        raise BadInput(f"several jobs run, name one with --job: {', '.join(jobs)}")
    return wanted or (jobs[0] if jobs else "")


def sample_of(status: Any, job: str, at_s: float) -> Sample:
    """What a status says of a job."""
    ranks = [rank for rank in status.ranks if rank.job == job]
    return Sample(
        at_s, {rank.rank: RankSample(rank.step, rank.live_bytes, rank.state == "running") for rank in ranks}
    )


class Pace:
    """What a job's samples, taken one after another, say of it; without I/O or clock.

    It begins anew after a recovery, during which steps stand still or go back.
    """

    def __init__(self) -> None:
        self.state_bytes = 0
        """Of all ranks together, the most that was seen: amid a step that is rather more than a snapshot."""
        self.world = 0
        """The most ranks that were seen."""
        self._ended = False
        self._begun_s = self._last_s = math.inf
        self._ranks: dict[int, _Advance] = {}

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> Pace:
        """After all of these."""
        pace = cls()
        for sample in samples:
            pace.take(sample)
        return pace

    def take(self, sample: Sample) -> None:
        """The next sample; after the job's end it counts for nothing."""
        self._ended = self._ended or not sample.ranks
        if self._ended:
            return
        self.state_bytes = max(self.state_bytes, sum(rank.live_bytes for rank in sample.ranks.values()))
        self.world = max(self.world, len(sample.ranks))
        recovering = not all(rank.running for rank in sample.ranks.values())
        if recovering or self._contradicted(sample):
            self._ranks, self._begun_s = {}, math.inf
        if recovering:
            return
        self._begun_s, self._last_s = min(self._begun_s, sample.at_s), sample.at_s
        for number, rank in sample.ranks.items():
            self._ranks.setdefault(number, _Advance(rank.step)).take(sample.at_s, rank.step)

    def enough(self, seconds: float) -> bool:
        """Whether a watch may end: the job has, or it has lasted and every rank was seen to advance."""
        if self._ended:
            return True
        lasted = bool(self._ranks) and self._last_s - self._begun_s >= seconds
        return lasted and all(rank.changes >= CHANGES for rank in self._ranks.values())

    @property
    def step_s(self) -> float | None:
        """Seconds per step on the wall clock, the median over ranks; None unless every rank advanced.

        Counted from the first change of a rank's step to its last, so that neither the beginning nor the end
        of the watch cuts a step in two.
        """
        if not self._ranks or any(rank.changes < 2 for rank in self._ranks.values()):
            return None
        return statistics.median(rank.step_s for rank in self._ranks.values())

    def _contradicted(self, sample: Sample) -> bool:
        """By a rank that went back, or by one that was not there before."""
        known = self._ranks
        return bool(known) and any(
            number not in known or rank.step < known[number].step for number, rank in sample.ranks.items()
        )


@dataclass
class _Advance:
    """Where one rank's step was seen to change.  When it came to its first step nobody saw."""

    step: int
    changes: int = 0
    first: tuple[float, int] = (0.0, 0)
    last: tuple[float, int] = (0.0, 0)

    def take(self, at_s: float, step: int) -> None:
        if step > self.step:
            self.last = (at_s, step)
            self.first = self.first if self.changes else self.last
            self.changes += 1
            self.step = step

    @property
    def step_s(self) -> float:
        return (self.last[0] - self.first[0]) / (self.last[1] - self.first[1])


class JobWatch:
    """Looks at one job."""

    def __init__(
        self,
        look: Callable[[], Any],
        job: str,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._look, self._job, self._clock, self._sleep = look, job, clock, sleep

    def watch(self, seconds: float) -> Pace:
        """At least so long, longer for slow steps; its `step_s` is None if even that did not do."""
        pace = Pace()
        until_s = self._clock() + PATIENCE * seconds
        while True:
            status = self._look()
            pace.take(sample_of(status, self._job, self._clock()))
            if pace.enough(seconds) or self._clock() >= until_s:
                return pace
            self._sleep(PERIOD_S)
