"""GPU-hours and money a month, where one way becomes better than another, and how many spares are needed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist
from typing import TYPE_CHECKING

from understudy.recovery.base.errors import BadInput
from understudy.recovery.costs.given.inputs import SECONDS_PER_DAY, Inputs
from understudy.recovery.costs.models.rungs import Failure
from understudy.recovery.costs.models.ways import Waste, Way, terms_of, waste_of

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

HOURS_PER_MONTH = 30 * 24.0
"""The paper's month has 30 errors at one a day."""
LARGEST = 100_000
"""N up to which ways are compared."""
LATE_AT_MOST = 0.001
"""Of failures that may find no spare, where the number of spares is told."""
MOST_BATCHES = 500.0
"""Failures in repair at once from which on a normal distribution does: the recursion begins at e^-this."""


@dataclass(frozen=True)
class Line:
    """What one way costs."""

    way: Way
    waste: Waste[float]
    per_hour: float
    """c*; 0 for a way without checkpoints."""
    gpu_hours: float
    """Wasted a month, of all GPUs."""
    money: float | None
    """None: no price was given."""


@dataclass(frozen=True)
class Crossover:
    """From `gpus` on `better` wastes less than `worse`, which is the other way round just below."""

    better: Way
    worse: Way
    gpus: int


@dataclass(frozen=True)
class Bill:
    """`left_out`: way -> the sentence that says why it is not there."""

    lines: tuple[Line, ...]
    left_out: dict[Way, str]
    crossovers: tuple[Crossover, ...]
    spares: int | None
    """That `LATE_AT_MOST` asks for; None: no repair time was given."""


def bill_of(inputs: Inputs) -> Bill:
    """Pure.  A way that cannot be reckoned is left out, with a sentence."""
    lines, left_out = [], {}
    for way in Way:
        try:
            lines.append(_line(way, inputs))
        except BadInput as why:
            left_out[way] = str(why)
    spares = None if inputs.devices is None else spares_for(inputs, LATE_AT_MOST)
    return Bill(tuple(lines), left_out, tuple(crossovers(inputs, [line.way for line in lines])), spares)


def _line(way: Way, inputs: Inputs) -> Line:
    waste = waste_of(way, inputs)
    rate = inputs.job.gpus * inputs.failures.rate
    hours = inputs.job.gpus * HOURS_PER_MONTH * waste.fraction
    money = None if inputs.prices is None else hours * inputs.prices.gpu_hour
    return Line(way, waste, 3600 * terms_of(way, inputs, inputs.job).frequency(rate), hours, money)


# ------------------------------------------------------------------ over N
def fractions(way: Way, inputs: Inputs, sizes: NDArray[numpy.int64]) -> NDArray[numpy.float64]:
    """w_f of the same model on each of `sizes` GPUs; not a number where the way cannot be reckoned.

    A model needs as many GPUs as it has shards in the file, and twice as many for a second replica.
    """
    import numpy

    shards = inputs.job.gpus // inputs.job.replicas
    found = numpy.full(len(sizes), numpy.nan)
    for replicas in (1, 2):
        where = (sizes >= shards) & (sizes < 2 * shards) if replicas == 1 else sizes >= 2 * shards
        job = inputs.job.with_gpus(replicas * shards)
        try:
            terms = terms_of(way, inputs, job)
        except BadInput:
            continue
        found[where] = terms.waste(sizes[where] * inputs.failures.rate).fraction
    return found


def crossovers(inputs: Inputs, ways: Sequence[Way]) -> Iterator[Crossover]:
    """By N, up to LARGEST."""
    import numpy

    sizes = numpy.arange(1, LARGEST + 1)
    known = {way: fractions(way, inputs, sizes) for way in ways}
    found = []
    for one, other in combinations(ways, 2):
        difference = known[one] - known[other]
        sign = numpy.sign(difference)
        for index in numpy.flatnonzero(sign[1:] * sign[:-1] < 0):
            better, worse = (one, other) if difference[index + 1] < 0 else (other, one)
            found.append(Crossover(better, worse, int(sizes[index + 1])))
    yield from sorted(found, key=lambda crossover: crossover.gpus)


# ------------------------------------------------------------------ spares
def spares_for(inputs: Inputs, late_at_most: float) -> int:
    """The fewest spares with which so small a share of failures finds none.

    Devices in repair are those of the failures within the last repair time: a compound Poisson number, as a
    host takes all of its GPUs along.  Its distribution follows from Panjer's recursion (Panjer 1981).
    """
    if inputs.devices is None:
        raise BadInput("devices is not given: how many spares are needed depends on how long a repair takes")
    sizes = {
        1: inputs.failures.shares.get(Failure.DEVICE, 0.0),
        inputs.job.gpus_per_host: inputs.failures.shares.get(Failure.HOST, 0.0),
    }
    if inputs.job.gpus_per_host == 1:
        sizes = {1: sum(inputs.failures.shares.get(kind, 0.0) for kind in (Failure.DEVICE, Failure.HOST))}
    taking = sum(sizes.values())
    repair_s = inputs.devices.repair_hours * SECONDS_PER_DAY / 24
    batches = inputs.job.gpus * inputs.failures.rate * taking * repair_s
    if not batches:
        return 0
    wanted = max(size for size, share in sizes.items() if share)
    if batches > MOST_BATCHES:
        mean = batches * sum(size * share / taking for size, share in sizes.items())
        spread = math.sqrt(batches * sum(size**2 * share / taking for size, share in sizes.items()))
        return math.ceil(NormalDist(mean, spread).inv_cdf(1 - late_at_most)) + wanted
    probabilities = [math.exp(-batches)]
    reached = probabilities[0]
    while reached < 1 - late_at_most:
        count = len(probabilities)
        probabilities.append(
            batches / count * sum(
                size * share / taking * probabilities[count - size]
                for size, share in sizes.items() if size <= count
            )
        )  # fmt: skip
        reached += probabilities[-1]
    return len(probabilities) - 1 + wanted
