"""A job's life, failure by failure: what the formulas leave out is in it (several failures at once, spares).

The clock is virtual.  Every second of it is one of `Account`'s.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from understudy.recovery.costs.given.inputs import SECONDS_PER_DAY, Backup, Inputs, Law
from understudy.recovery.costs.models.failures import (
    AT_ONCE,
    Event,
    bursts,
    merged,
    of_trace,
    preemptions,
    single,
)
from understudy.recovery.costs.models.goodput_model import read_trace
from understudy.recovery.costs.models.pacing import Pace
from understudy.recovery.costs.models.rungs import Failed, Failure, Ladder, dead, devices_wanted, worst_of
from understudy.recovery.costs.models.ways import Way, backup_overhead, recovery_s, steady_overhead, terms_of
from understudy.recovery.planning.planner import PlanName

if TYPE_CHECKING:
    from numpy.random import Generator

RESTART = "restart"
"""What is counted where a way has no ladder."""
MOVE = "move"


@dataclass
class Account:
    """Seconds of one job, by what they went to."""

    useful: float = 0.0
    steady: float = 0.0
    detection: float = 0.0
    recovery: float = 0.0
    redone: float = 0.0
    waiting: float = 0.0
    """For a device."""
    failures: int = 0
    moves: int = 0
    rungs: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> float:
        """The clock."""
        return self.useful + self.steady + self.detection + self.recovery + self.redone + self.waiting

    @property
    def fraction(self) -> float:
        """w_f: of all time, what was wasted."""
        return 1 - self.useful / self.total if self.total else 0.0


@dataclass(frozen=True)
class Outage:
    """What follows a failure, in this order, in seconds.  `back_to`: useful seconds that are left then."""

    name: str
    waiting: float
    detection: float
    recovery: float
    again: float
    """Of the minibatch, done again behind the recovery."""
    back_to: float


def one_job(inputs: Inputs, way: Way, seconds: float, seed: int) -> Account:
    """One job for so long, with what `inputs.simulation` lets happen; the same failures for every way.

    Raises BadInput where the way is not given, or lacks a time that it turns out to need.
    """
    import numpy

    streams = [numpy.random.default_rng([seed, number]) for number in range(4)]
    return simulate(inputs, way, _events(inputs, seconds, streams), seconds, _uniform(streams[3]))


def _events(inputs: Inputs, seconds: float, streams: Sequence[Generator]) -> Iterator[Event]:
    layout, told = inputs.job.layout, inputs.simulation
    if told is None:
        return single(layout, inputs.failures, Law.EXPONENTIAL, 1.0, seconds, streams[0])
    if told.trace is not None:
        return of_trace(layout, read_trace(told.trace), streams[0])
    return merged(
        single(layout, inputs.failures, told.law, told.shape, seconds, streams[0]),
        bursts(layout, told.bursts_per_rack_day / SECONDS_PER_DAY, seconds, streams[1]),
        preemptions(layout, told.preempted_per_host_day / SECONDS_PER_DAY, seconds, streams[2]),
    )


def _uniform(generator: Generator) -> Iterator[float]:
    while True:
        yield from generator.random(AT_ONCE).tolist()


def simulate(
    inputs: Inputs, way: Way, events: Iterable[Event], seconds: float, draws: Iterable[float]
) -> Account:
    """One job through these events.  `draws`: numbers in [0, 1), how far in its minibatch each failure falls.

    Raises BadInput where the way is not given, or lacks a time that it turns out to need.
    """
    return _Life(inputs, way, iter(draws)).through(events, seconds)


_BACK_TO = {PlanName.RESTORE_SNAPSHOT_REPLAY: "images", PlanName.RESTORE_STORED_REPLAY: "stored"}


class _Spares:
    """Devices that are idle now, and when others come back from repair."""

    def __init__(self, idle: float) -> None:
        self.idle = idle
        self._coming: list[tuple[float, int]] = []

    def repair(self, count: int, until: float) -> None:
        heapq.heappush(self._coming, (until, count))

    def at(self, now: float) -> float:
        while self._coming and self._coming[0][0] <= now:
            self.idle += heapq.heappop(self._coming)[1]
        return self.idle

    def enough_at(self, wanted: int, now: float) -> float:
        """When so many are there; infinite if nothing that is known of brings them."""
        found = self.at(now)
        if found >= wanted:
            return now
        for when, count in sorted(self._coming):
            found += count
            if found >= wanted:
                return when
        return math.inf


class _Life:
    def __init__(self, inputs: Inputs, way: Way, draws: Iterator[float]) -> None:
        self._inputs, self._way, self._draws = inputs, way, draws
        self._terms = terms_of(way, inputs, inputs.job)
        self._layout = inputs.job.layout
        self._ladder = Ladder(self._layout, inputs.ours.kept) if inputs.ours and way is Way.OURS else None
        self._paces = self._all_paces()
        self._kept = dict.fromkeys(self._paces, 0.0)
        self._spares = _Spares(math.inf if inputs.devices is None else inputs.devices.spares)
        self._account = Account()
        self._useful = 0.0

    def _all_paces(self) -> dict[str, Pace]:
        """What training goes back to -> how it comes by it; each has the whole overhead."""
        inputs, terms = self._inputs, self._terms
        if self._way is Way.PERIODIC:
            often = terms.frequency(inputs.job.gpus * inputs.failures.rate)
            return {"stored": Pace(0.0, 1 / often if often else math.inf, terms.checkpoint, 0.0)}
        if self._way is Way.OURS and inputs.ours is not None:
            kept = {"images": inputs.ours.images, "stored": inputs.ours.stored}
            overhead = steady_overhead(inputs.ours)
        else:
            section = inputs.user_level if self._way is Way.USER_LEVEL else inputs.transparent
            assert section is not None  # terms_of has refused else
            kept = {"stored": section.backup}
            overhead = section.overhead + backup_overhead(section.backup)
        return {name: _pace(one, overhead) for name, one in kept.items()}

    def through(self, events: Iterable[Event], seconds: float) -> Account:
        resumed, down, pending = 0.0, dict[int, Failure](), None
        began = 0.0
        for event in events:
            if event.at >= seconds:
                break
            self._spares.idle += event.returned
            if pending is not None and event.at >= (end := began + _length(pending)):
                self._end(pending, down, end)
                resumed, down, pending = end, {}, None
            if not event.failed and (pending is None or event.at >= began + pending.waiting):
                continue
            if pending is None:
                self._train(event.at - resumed)
            else:
                self._spend(pending, event.at - began)
            self._devices_lost(event)
            if event.noticed and pending is None and self._moves(event):
                began, pending = event.at, self._move(event)
                continue
            down = _together(down, event.failed)
            began, pending = event.at, self._outage(down, event.at)
            if event.failed:
                self._account.failures += 1
                self._account.rungs[pending.name] += 1
        if pending is not None and seconds >= (end := began + _length(pending)):
            self._end(pending, down, end)
            resumed, pending = end, None
        if pending is not None:
            self._spend(pending, seconds - began)
        else:
            self._train(max(0.0, seconds - resumed))
        self._account.useful = self._useful
        return self._account

    # Time that passes.

    def _train(self, seconds: float) -> None:
        before = self._useful
        for name, pace in self._paces.items():
            self._useful, self._kept[name] = pace.advance(before, self._kept[name], seconds)
        self._account.steady += seconds - (self._useful - before)

    def _spend(self, outage: Outage, seconds: float) -> None:
        """So much of an outage, before another failure or the end cuts it off."""
        for part in ("waiting", "detection", "recovery"):
            taken = min(seconds, getattr(outage, part))
            setattr(self._account, part, getattr(self._account, part) + taken)
            seconds -= taken
        self._account.redone += seconds
        self._go_back(outage)

    def _end(self, outage: Outage, down: Failed, at: float) -> None:
        self._spend(outage, _length(outage))
        self._spares.at(at)
        self._spares.idle -= devices_wanted(down)

    def _go_back(self, outage: Outage) -> None:
        self._account.redone += self._useful - outage.back_to
        self._useful = outage.back_to
        self._kept = {name: min(kept, self._useful) for name, kept in self._kept.items()}

    # What a failure leads to.

    def _devices_lost(self, event: Event) -> None:
        taken = devices_wanted(event.failed)
        if taken and event.repaired and self._inputs.devices is not None:
            self._spares.repair(taken, event.at + 3600 * self._inputs.devices.repair_hours)

    def _outage(self, down: Failed, at: float) -> Outage:
        wanted = devices_wanted(down)
        waiting = self._spares.enough_at(wanted, at) - at
        again = self._inputs.job.minibatch_s * next(self._draws)
        if self._ladder is not None:
            return self._ours(self._ladder, down, at, waiting, again)
        terms = self._terms
        if self._way is Way.PERIODIC or self._layout.lost_shards(dead(down)):
            return Outage(RESTART, waiting, terms.detection, terms.recovery, 0.0, self._kept["stored"])
        recovery = terms.recovery
        if self._way is Way.TRANSPARENT and (paper := self._inputs.transparent) is not None:
            recovery = paper.hard_s if wanted else paper.transient_s
        return Outage(self._way.value, waiting, terms.detection, recovery, again, self._useful)

    def _ours(self, ladder: Ladder, down: Failed, at: float, waiting: float, again: float) -> Outage:
        ours = self._inputs.ours
        assert ours is not None
        free = self._spares.at(at)
        rung = ladder.rung(down, self._layout.gpus if free == math.inf else int(free))
        worst = worst_of(down.values())
        detection = ours.detect_s[worst]
        if rung is PlanName.GIVE_UP:
            return Outage(rung.value, waiting, detection, ours.restart_s, 0.0, self._kept["stored"])
        recovery = recovery_s(ours, rung, worst)
        place = _BACK_TO.get(rung)
        if place is None:
            return Outage(rung.value, waiting, detection, recovery, again, self._useful)
        return Outage(rung.value, waiting, detection, recovery, 0.0, self._kept[place])

    # Hosts that are taken away with notice.

    def _moves(self, event: Event) -> bool:
        told = self._inputs.simulation
        return (
            told is not None
            and self._way is Way.OURS
            and told.notice_s >= told.move_s
            and self._spares.at(event.at) >= len(event.failed)
        )

    def _move(self, event: Event) -> Outage:
        assert self._inputs.simulation is not None
        self._spares.idle -= len(event.failed)
        self._account.moves += 1
        return Outage(MOVE, 0.0, 0.0, self._inputs.simulation.move_s, 0.0, self._useful)


def _pace(kept: Backup | None, overhead: float) -> Pace:
    """With what its copies cost spread over all of training, as it is in the formulas."""
    return Pace(overhead) if kept is None else Pace(overhead, kept.every_s, 0.0, kept.durable_s)


def _length(outage: Outage) -> float:
    return outage.waiting + outage.detection + outage.recovery + outage.again


def _together(down: Failed, failed: Failed) -> dict[int, Failure]:
    """Ranks that are down, each by the worst that has befallen it."""
    return {
        rank: worst_of(one[rank] for one in (down, failed) if rank in one)
        for rank in down.keys() | failed.keys()
    }
