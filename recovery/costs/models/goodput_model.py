"""Goodput under a trace of devices that come and go: the paper's formula, and a run through the events.

Source of the formula: PCcheck (ASPLOS'25), section 5.2.3 with the recovery times of 4.2.  Both are pure and
deterministic; steps count once, however many devices take part, as in the paper.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise
from pathlib import Path

from understudy.recovery.costs.given.goodput_costs import Costs, Keeping, Persisting, Policy
from understudy.recovery.snapshots.tuning.tuner import longest_recovery_s


class BadTrace(ValueError):
    """The trace cannot be used; its text is the sentence to print."""


@dataclass(frozen=True)
class Change:
    """The number of devices at a sample, where it differs from the one before."""

    at_s: float
    """Since the first sample."""
    before: int
    after: int

    @property
    def is_loss(self) -> bool:
        """A preemption, of one device or many."""
        return self.after < self.before


@dataclass(frozen=True)
class Trace:
    """Samples: seconds since the first, ascending, and how many devices there were."""

    samples: tuple[tuple[float, int], ...]

    @property
    def length_s(self) -> float:
        """From the first sample to the last [T]."""
        return self.samples[-1][0]

    @property
    def changes(self) -> tuple[Change, ...]:
        """In order."""
        return tuple(
            Change(at, before, after)
            for (_, before), (at, after) in pairwise(self.samples)
            if before != after
        )

    def until_devices_are_gone(self) -> Trace:
        """Without what follows the last sample that has a device: nothing can be trained there any more."""
        last = max((index for index, (_, devices) in enumerate(self.samples) if devices), default=0)
        return Trace(self.samples[: last + 1])


def read_trace(path: Path) -> Trace:
    """CSV with the columns Time (seconds, Unix) and GPUs.  Raises BadTrace."""
    try:
        with path.open(newline="") as file:
            rows = [(float(row["Time"]), int(row["GPUs"])) for row in csv.DictReader(file)]
    except OSError as problem:
        raise BadTrace(f"{path} cannot be read: {problem.strerror}") from problem
    except (KeyError, TypeError, ValueError) as problem:
        raise BadTrace(
            f"{path} is no trace: it needs the columns Time and GPUs, numbers in all rows"
        ) from problem
    if len(rows) < 2 or any(not a < b for (a, _), (b, _) in pairwise(rows)) or min(g for _, g in rows) < 0:
        raise BadTrace(f"{path} is no trace: it needs two rows or more, ascending times and no negative GPUs")
    begin = rows[0][0]
    return Trace(tuple((time - begin, devices) for time, devices in rows))


# ------------------------------------------------------------------ the paper's formula
@dataclass(frozen=True)
class Formula:
    """What section 5.2.3 gives."""

    goodput: float
    """Useful steps per second."""
    without_failures: float
    """Steps in T if nothing ever happened."""
    redone: float
    """Steps trained again."""
    recovering_s: float
    """[rec] loading and training again."""


def longest_recovery_of(policy: Policy, interval: int, step_s: float) -> float:
    """Upper bounds of section 4.2, seconds: GPM l + f t, CheckFreq and Gemini l + 2 f t, PCcheck eq. (4)."""
    if policy.persists is Persisting.STALLS:
        return policy.load_s + interval * step_s
    if policy.persists is Persisting.ONE_AT_A_TIME:
        return policy.load_s + 2 * interval * step_s
    return longest_recovery_s(interval, policy.in_flight, step_s, policy.write_s, policy.load_s)


def by_formula(costs: Costs, policy: Policy, interval: int, length_s: float, rollbacks: int) -> Formula:
    """goodput = ((T - rec) / t) / T, t with the snapshots' overhead; rec: `rollbacks` [r] average recoveries.

    The paper gives bounds of a recovery, 0 <= recovery <= l + ..., and says "average"; that is taken to be l,
    which is always spent, and half of the rest.  Reattaching the storage is left out, as there.
    """
    step_s = costs.step_s * policy.slowdown[interval]
    trained_again_s = (longest_recovery_of(policy, interval, step_s) - policy.load_s) / 2
    recovering_s = min(length_s, rollbacks * (policy.load_s + trained_again_s))
    return Formula(
        goodput=(length_s - recovering_s) / step_s / length_s,
        without_failures=length_s / step_s,
        redone=rollbacks * trained_again_s / step_s,
        recovering_s=recovering_s,
    )


# ------------------------------------------------------------------ through the events
@dataclass(frozen=True)
class Run:
    """One way through the trace.  Trained steps = kept + redone."""

    kept: float
    """Steps that the job still has at the end."""
    redone: float
    """Steps that were lost with the devices."""
    stopped_s: float
    """In which nothing was trained."""
    in_place: float
    """Recoveries from replicas, and devices taken in; broken in a mean."""
    restored: float
    """Returns to a snapshot."""
    from_scratch: float
    """... of which none was left."""


@dataclass(frozen=True)
class _Job:
    """Training from `base` steps on since `resumes_s`; before that, it recovers."""

    base: float
    durable: float
    """Steps of the newest snapshot that will be found."""
    resumes_s: float
    """Infinite while there are too few devices."""
    holds_state: bool
    """Whether the devices have it already, or are loading it."""


def through_events(
    trace: Trace, costs: Costs, policy: Policy, interval: int, seed: int | None, rejoins: bool = True
) -> Run:
    """Train through the trace; what is lost is what the newest snapshot durable at that instant lacks.

    A loss takes devices drawn from `seed`, the same for every policy and interval, as the trace does not
    name them; without a seed it is unlucky and takes those of one shard first.  Where a policy can go on in
    place and every shard has a device left, it does, and keeps its steps; everything else goes back to the
    newest snapshot.  Gained devices are a change like any other (the paper's rule), or with `rejoins` false
    are ignored by a job that runs.  With fewer devices than shards the job waits.  Snapshots under way at a
    change are lost, also where the devices were not.
    """
    rate = 1 / (costs.step_s * policy.slowdown[interval])
    job = _Job(0.0, 0.0, 0.0 if trace.samples[0][1] >= costs.shards else math.inf, True)
    redone = trained = 0.0
    in_place = restored = from_scratch = 0
    for number, change in enumerate(trace.changes):
        if not change.is_loss and not rejoins and job.resumes_s < math.inf:
            continue
        now, durable = _progress(job, policy, interval, rate, change.at_s)
        trained += now - job.base
        left = _survivors(change, costs.shards, None if seed is None else f"{seed}:{number}")
        enough = change.after >= costs.shards
        held = job.holds_state or change.at_s >= job.resumes_s
        if (
            policy.in_place
            and held
            and enough
            and {i % costs.shards for i in left} == set(range(costs.shards))
        ):
            pause = policy.in_place.replica_s if change.is_loss else policy.in_place.join_s
            job = _Job(now, durable, change.at_s + pause, True)
            in_place += 1
            continue
        if not _snapshot_survives(change, left, policy, costs.shards):
            durable = 0.0
            from_scratch += 1
        redone += now - durable
        back_s = change.at_s + policy.reattach_s + policy.load_s if enough else math.inf
        job = _Job(durable, durable, back_s, False)
        restored += 1
    kept, _ = _progress(job, policy, interval, rate, trace.length_s)
    trained += kept - job.base
    return Run(kept, redone, trace.length_s - trained / rate, in_place, restored, from_scratch)


def durable_after_s(policy: Policy, interval: int, step_s: float) -> float:
    """Seconds of training from the begin of a snapshot until it is durable; `step_s` with the overhead.

    No more than the snapshots under way allow, as eq. (4) has it: a next one had to wait, and that wait is in
    the measured step.  One that stalls is durable when training goes on.
    """
    if policy.persists is Persisting.STALLS:
        return 0.0
    return min(policy.write_s, policy.in_flight * interval * step_s)


def _progress(job: _Job, policy: Policy, interval: int, rate: float, at_s: float) -> tuple[float, float]:
    """(steps, steps of the newest durable snapshot) at a time."""
    trained_s = at_s - job.resumes_s
    if trained_s <= 0:
        return job.base, job.durable
    begun_by_s = trained_s - durable_after_s(policy, interval, 1 / rate)
    newest = math.floor((job.base + begun_by_s * rate) / interval) * interval
    return job.base + trained_s * rate, float(newest) if newest > job.base else job.durable


def _survivors(change: Change, shards: int, seed: str | None) -> Sequence[int]:
    """Devices of before that are left."""
    if not change.is_loss:
        return range(change.before)
    if seed is None:
        by_shard = sorted(range(change.before), key=lambda device: (device % shards, device))
        return by_shard[change.before - change.after :]
    return sorted(random.Random(seed).sample(range(change.before), change.after))


def _snapshot_survives(change: Change, left: Sequence[int], policy: Policy, shards: int) -> bool:
    if policy.keeps_in is Keeping.STORAGE or not change.is_loss:
        return True
    held = {i % shards for i in left} | {(i - 1) % change.before % shards for i in left}
    return len(held) >= min(shards, change.before)


# ------------------------------------------------------------------ both, for everything measured
@dataclass(frozen=True)
class Row:
    """A policy at an interval."""

    policy: str
    interval: int
    formula: Formula
    run: Run
    """Means over the draws of what the losses take."""
    goodput: float
    """Kept steps per second of the trace, mean over the draws."""
    goodput_least: float
    goodput_most: float
    goodput_unlucky: float
    """If each loss takes the devices of one shard first."""


def evaluate(costs: Costs, trace: Trace, draws: int, every_change: bool) -> list[Row]:
    """All policies at all their intervals.  `every_change`: gained devices are one, too (see goodput.py)."""
    rollbacks = sum(1 for change in trace.changes if every_change or change.is_loss)
    rows = []
    for policy in costs.policies:
        for interval in policy.slowdown:
            formula = by_formula(costs, policy, interval, trace.length_s, rollbacks)
            seeds: list[int | None] = [*range(draws), None]
            *runs, unlucky = (
                through_events(trace, costs, policy, interval, seed, rejoins=every_change) for seed in seeds
            )
            kept = [run.kept / trace.length_s for run in (_mean(runs), *runs, unlucky)]
            spread = (min(kept[1:-1]), max(kept[1:-1]))
            rows.append(Row(policy.name, interval, formula, _mean(runs), kept[0], *spread, kept[-1]))
    return rows


def _mean(runs: Sequence[Run]) -> Run:
    columns = zip(*(astuple(run) for run in runs), strict=True)
    return Run(*(sum(column) / len(runs) for column in columns))
