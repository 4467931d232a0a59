"""When what fails: streams of events in a job's wall-clock time, each from a seed."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from understudy.recovery.costs.given.inputs import Failures, Law
from understudy.recovery.costs.models.goodput_model import Trace
from understudy.recovery.costs.models.layout import Layout
from understudy.recovery.costs.models.rungs import Failure

if TYPE_CHECKING:
    import numpy

AT_ONCE = 4096
"""Random numbers that are drawn in one go."""


@dataclass(frozen=True)
class Event:
    """At `at` seconds, `failed` ranks fail together; `returned`: devices that come back beside repairs.

    `noticed`: they are taken away with notice, so that they can move before.
    """

    at: float
    failed: Mapping[int, Failure] = field(default_factory=dict)
    returned: int = 0
    noticed: bool = False
    repaired: bool = True
    """Whether lost devices come back by repair; those of a trace come back when it says so."""


def single(
    layout: Layout,
    failures: Failures,
    law: Law,
    shape: float,
    until: float,
    generator: numpy.random.Generator,
) -> Iterator[Event]:
    """One GPU, or its host, at a time, by the shares of kinds."""
    times = (
        _exponential(layout.gpus, failures.rate, until, generator)
        if law is Law.EXPONENTIAL
        else _weibull(layout.gpus, failures.rate, shape, until, generator)
    )
    kinds = [kind for kind, share in failures.shares.items() if share]
    shares = [failures.shares[kind] for kind in kinds]
    drawn: list[int] = []
    for at, rank in times:
        if not drawn:
            drawn = generator.choice(len(kinds), AT_ONCE, p=shares).tolist()
        yield Event(at, of_kind(layout, kinds[drawn.pop()], rank))


def of_kind(layout: Layout, kind: Failure, rank: int) -> dict[int, Failure]:
    """A host takes all its ranks along."""
    ranks: Sequence[int] = layout.on_host(layout.host_of(rank)) if kind is Failure.HOST else (rank,)
    return dict.fromkeys(ranks, kind)


def bursts(
    layout: Layout, per_rack_second: float, until: float, generator: numpy.random.Generator
) -> Iterator[Event]:
    """All hosts of a rack at once: a power supply, a switch."""
    for at, rack in _exponential(layout.racks, per_rack_second, until, generator):
        ranks = [rank for host in layout.in_rack(rack) for rank in layout.on_host(host)]
        yield Event(at, dict.fromkeys(ranks, Failure.HOST))


def preemptions(
    layout: Layout, per_host_second: float, until: float, generator: numpy.random.Generator
) -> Iterator[Event]:
    """Hosts that are taken away with notice."""
    for at, host in _exponential(layout.hosts, per_host_second, until, generator):
        yield Event(at, dict.fromkeys(layout.on_host(host), Failure.HOST), noticed=True)


def of_trace(layout: Layout, trace: Trace, generator: numpy.random.Generator) -> Iterator[Event]:
    """Devices that come and go as in a trace of another size: its largest number stands for all of ours."""
    whole = max(devices for _, devices in trace.samples)
    there = layout.gpus
    for change in trace.changes:
        now = round(layout.gpus * change.after / whole)
        if now < there:
            lost = generator.choice(layout.gpus, there - now, replace=False)
            yield Event(change.at_s, dict.fromkeys(map(int, lost), Failure.DEVICE), repaired=False)
        elif now > there:
            yield Event(change.at_s, returned=now - there)
        there = now


def merged(*streams: Iterator[Event]) -> Iterator[Event]:
    """In the order of time."""
    return heapq.merge(*streams, key=lambda event: event.at)


def _exponential(
    units: int, rate: float, until: float, generator: numpy.random.Generator
) -> Iterator[tuple[float, int]]:
    """(seconds, unit): failures of so many units, each at `rate`, superposed."""
    if not rate:
        return
    at = 0.0
    while True:
        gaps = generator.exponential(1 / (units * rate), AT_ONCE).tolist()
        which = generator.integers(units, size=AT_ONCE).tolist()
        for gap, unit in zip(gaps, which, strict=True):
            at += gap
            if at >= until:
                return
            yield at, unit


def _weibull(
    units: int, rate: float, shape: float, until: float, generator: numpy.random.Generator
) -> Iterator[tuple[float, int]]:
    """Each unit renewed when it fails; in equilibrium from the beginning, so that the mean rate is `rate`."""
    if not rate:
        return
    scale = 1 / (rate * math.gamma(1 + 1 / shape))
    # What is left of a life that an observer finds under way: a uniform share of a length-biased life, whose
    # power `shape` over that of `scale` has a gamma distribution.
    lives = scale * generator.gamma(1 + 1 / shape, size=units) ** (1 / shape)
    left = lives * generator.random(units)
    heap = [(float(left[unit]), int(unit)) for unit in (left < until).nonzero()[0]]
    heapq.heapify(heap)
    while heap:
        at, unit = heap[0]
        yield at, unit
        heapq.heapreplace(heap, (at + scale * float(generator.weibull(shape)), unit))
        while heap and heap[0][0] >= until:
            heapq.heappop(heap)
