"""Tunes again while training runs, when what was measured has changed: what PCcheck, section 3.4, plans.

Pure: an adapter takes an observation, its time included, and returns the next adapter.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

from understudy.recovery.snapshots.tuning.tuner import (
    CannotTune,
    Choice,
    Limits,
    Measured,
    tune,
    write_time,
)

DRIFT = 0.2
"""How far a smoothed value may lie from the one tuned for, as a share of the larger of the two: x 0.8 or
x 1.25.  Of the larger, so that noise of +-10 %, which spans x 1.22, never counts wherever in it one tuned."""
LOST_DRIFT = 0.1
"""How far the share of writing that is lost to training may lie off, at least: it is a noisy difference."""
MOST_LOST = 0.9
"""Of writing; were it more, training would hardly go on meanwhile."""
PATIENCE = 3
"""Observations in a row that must show a drift: one odd one, where there are no others yet, does not."""
WINDOW = 9
"""Observations that a smoothed value is the median of: four odd ones among nine change nothing."""
HOLD_S = 30.0
"""For so long a new choice stays, whatever is seen: evaluations, for example, come and go."""
FORGET_S = 3600.0
"""Older observations are of another time."""
CONVERGES_WITHIN = WINDOW // 2 + PATIENCE
"""Observations after which a lasting change has been tuned for, unless `HOLD_S` is still running."""


@dataclass(frozen=True)
class Observation:
    """What one snapshot, or a while of training, showed; None: nothing.  Raises CannotTune on nonsense."""

    at_s: float
    """Of any clock that does not go back."""
    step_s: float | None = None
    """Seconds per step while nothing is written (else divide by slowdown_while_persisting)."""
    write_s: float | None = None
    """Seconds that one snapshot took until it was durable ..."""
    in_flight: int = 1
    """... while so many were under way."""
    storage_bytes_s: float | None = None
    lost: float | None = None
    """Seconds that writing one snapshot held up training, over `write_s`; noise may make it negative."""

    def __post_init__(self) -> None:
        for name in ("step_s", "write_s", "storage_bytes_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise CannotTune(f"{name} was observed to be {value}: it must be more than 0")
        if self.lost is not None and not math.isfinite(self.lost):
            raise CannotTune(f"lost was observed to be {self.lost}")
        if self.in_flight < 1:
            raise CannotTune(f"a write was observed with {self.in_flight} snapshots under way: 1 or more")


@dataclass(frozen=True)
class Scales:
    """Values of now over those of the first measurement, without unit."""

    step: float = 1.0
    write: float = 1.0
    storage: float = 1.0
    lost: float | None = None
    """No ratio: the share of writing that is lost to training; None: as was measured."""

    def drifted_from(self, other: Scales) -> bool:
        """Whether one of them is more than `DRIFT` away from what it was; symmetric."""
        pairs = ((self.step, other.step), (self.write, other.write), (self.storage, other.storage))
        mine, others = self.lost, other.lost
        if mine is not None and others is not None:
            drifted = abs(mine - others) > max(LOST_DRIFT, DRIFT * max(mine, others))
        else:
            drifted = False
        return drifted or any(abs(now - then) > DRIFT * max(now, then) for now, then in pairs)


@dataclass(frozen=True)
class Adapter:
    """A choice that follows what is observed; make the first with `Adapter.begin`."""

    measured: Measured
    """Before the training; observations are kept as ratios to it."""
    limits: Limits
    choice: Choice
    tuned_for: Scales = Scales()
    tuned_at_s: float = -math.inf
    drifting: int = 0
    """Observations in a row that showed a drift."""
    steps: tuple[tuple[float, float], ...] = ()
    """(time, ratio), the newest `WINDOW`; so are the next two."""
    writes: tuple[tuple[float, float], ...] = ()
    storage: tuple[tuple[float, float], ...] = ()
    losses: tuple[tuple[float, float], ...] = ()
    """(time, share)."""
    seen_s: float = -math.inf

    @classmethod
    def begin(cls, measured: Measured, limits: Limits) -> Adapter:
        """Tuned for the first measurement.  Raises CannotTune, see `tune`."""
        measured = scaled(measured, Scales())
        lost = 1 - 1 / measured.slowdown_while_persisting
        return cls(measured, limits, tune(measured, limits), Scales(lost=lost))

    def observed(self, seen: Observation) -> Adapter:
        """The adapter after this observation; its choice differs only after a lasting drift.

        Lasting: `PATIENCE` observations in a row whose medians lie more than `DRIFT` off what was tuned for.
        Then it is tuned for the medians, and those become what drift is measured against: to go back, a value
        must return by as much as it came.
        Raises CannotTune if the time of the observation lies before that of the last one.
        """
        if seen.at_s < self.seen_s:
            raise CannotTune(f"an observation of {seen.at_s} s came after one of {self.seen_s} s")
        expected_s = write_time(self.measured, seen.in_flight)
        kept = replace(
            self,
            steps=_with(self.steps, seen.at_s, seen.step_s, self.measured.step_s),
            writes=_with(self.writes, seen.at_s, seen.write_s, expected_s),
            storage=_with(self.storage, seen.at_s, seen.storage_bytes_s, self.measured.storage_bytes_s),
            losses=_with(self.losses, seen.at_s, seen.lost, 1.0),
            seen_s=seen.at_s,
        )
        now = kept.smoothed
        if not now.drifted_from(self.tuned_for):
            return replace(kept, drifting=0)
        kept = replace(kept, drifting=self.drifting + 1)
        if kept.drifting < PATIENCE or seen.at_s - self.tuned_at_s < HOLD_S:
            return kept
        choice = tune(scaled(self.measured, now), self.limits)
        return replace(kept, choice=choice, tuned_for=now, tuned_at_s=seen.at_s, drifting=0)

    @property
    def smoothed(self) -> Scales:
        """Medians of what was observed lately; of what was not observed, the value tuned for."""
        return Scales(
            _median(self.steps, self.tuned_for.step),
            _median(self.writes, self.tuned_for.write),
            _median(self.storage, self.tuned_for.storage),
            min(MOST_LOST, max(0.0, _median(self.losses, self.tuned_for.lost or 0.0))),
        )

    @property
    def measured_now(self) -> Measured:
        """What the present choice was tuned for."""
        return scaled(self.measured, self.tuned_for)


def scaled(measured: Measured, by: Scales) -> Measured:
    """The measurement if its values had been so many times as large; every T_w(N) moves alike.

    So N* stays (but for ties) and f* follows, as the paper means to "adapt (3)".  The storage is at least as
    fast as the writes show it to be.  Else its rate would change the estimated T_w(N) and not the measured
    ones, N* with that, and what is observed at one N would lead to another and back.
    """
    times = {count: taken * by.write for count, taken in measured.write_time_s.items()}
    shown = max(measured.state_bytes * count / taken for count, taken in times.items())
    slowdown = measured.slowdown_while_persisting if by.lost is None else 1 / (1 - by.lost)
    return replace(
        measured,
        step_s=measured.step_s * by.step,
        write_time_s=times,
        storage_bytes_s=max(shown, measured.storage_bytes_s * by.storage),
        slowdown_while_persisting=slowdown,
    )


def _with(
    kept: tuple[tuple[float, float], ...], at_s: float, value: float | None, reference: float
) -> tuple[tuple[float, float], ...]:
    if value is not None:
        kept = (*kept, (at_s, value / reference))[-WINDOW:]
    return tuple((when, ratio) for when, ratio in kept if at_s - when <= FORGET_S)


def _median(kept: tuple[tuple[float, float], ...], otherwise: float) -> float:
    return statistics.median(ratio for _, ratio in kept) if kept else otherwise
