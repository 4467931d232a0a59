"""Paired differences and their intervals: what may be said of a few seeds. Pure, with a fixed seed of its own.

Runs of one suite and seed see the same data, the same faults, and the same minutes of the machine's day
(they took turns), so differences are formed inside such a pair, and means of them are what is shown.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import TypeVar

CONFIDENCE = 0.95
RESAMPLES = 9_999
SEED = 20_240_422
"""Of the resampling: the same runs give the same intervals."""
NO_DIFFERENCE = "no difference shown"

Pair = TypeVar("Pair", bound=Hashable)


@dataclass(frozen=True)
class Estimate:
    """A mean of `n` differences. `low`, `high`: its 95 % interval; None where n < 2, and NaN mean where n = 0."""

    mean: float
    n: int
    low: float | None = None
    high: float | None = None

    @property
    def shows_a_difference(self) -> bool:
        """An interval that has zero in it shows none, and neither does a single difference."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high

    def text(self, unit: str = "%", digits: int = 1) -> str:
        """For people."""
        unit = f" {unit}" if unit else ""
        if self.n == 0:
            return "–"
        if self.low is None or self.high is None:
            return f"{self.mean:+.{digits}f}{unit} (once: no interval)"
        interval = f"{self.low:+.{digits}f} to {self.high:+.{digits}f}{unit}"
        if not self.shows_a_difference:
            return f"{NO_DIFFERENCE} ({interval})"
        return f"{self.mean:+.{digits}f}{unit} ({interval})"


NOTHING = Estimate(math.nan, 0)


def estimate(differences: Sequence[float]) -> Estimate:
    """Mean and percentile bootstrap interval. Raises ValueError where a difference is not finite."""
    if not all(map(math.isfinite, differences)):
        raise ValueError(f"differences must be finite: {list(differences)}")
    if not differences:
        return NOTHING
    mean = fmean(differences)
    if len(differences) < 2:
        return Estimate(mean, len(differences))
    low, high = _interval(tuple(differences))
    return Estimate(mean, len(differences), low, high)


def over_suites(by_suite: Mapping[str, Sequence[float]]) -> Estimate:
    """Over several suites: each counts once, with the mean of its seeds, which are not independent of each other.

    Of a single suite, over its seeds.
    """
    filled = [values for values in by_suite.values() if values]
    if len(filled) == 1:
        return estimate(filled[0])
    return estimate([fmean(values) for values in filled])


def gains(ours: Mapping[Pair, float], against: Mapping[Pair, float]) -> list[float]:
    """Percent by which `ours` is more, for each pair that both have; those against nothing are left out."""
    both = (pair for pair in ours if against.get(pair, 0.0) > 0)
    return [100 * (ours[pair] / against[pair] - 1) for pair in both]


def differences(ours: Mapping[Pair, float], against: Mapping[Pair, float]) -> list[float]:
    """By how much `ours` is more, for each pair that both have."""
    return [value - against[pair] for pair, value in ours.items() if pair in against]


@lru_cache(maxsize=4096)
def _interval(values: tuple[float, ...]) -> tuple[float, float]:
    if min(values) == max(values):  # scipy warns of a degenerate distribution, and is right
        return values[0], values[0]
    import numpy
    from scipy.stats import bootstrap

    found = bootstrap(
        (numpy.array(values),),
        numpy.mean,
        confidence_level=CONFIDENCE,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=numpy.random.default_rng(SEED),
        vectorized=True,
    ).confidence_interval
    return float(found.low), float(found.high)
