"""Which of the places that the programmer has hinted at become checkpoints (paper 000 §2).

`place` answers for a program whose blocks are all known, `place_periodic` for a loop whose body is the same
each time. Both minimise the seconds that failures make the program repeat, on average, and spend no more on
checkpoints than the allowance: `overhead` × the program's own seconds. (The paper rounds the number of
checkpoints up, and so spends up to one more.) The seconds of a checkpoint count as spent, and not as
part of a block.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from .cost import Cost, Curve, curve_of, expected_loss, quantity, summed
from .knapsack import closed
from .paths import Found, Line, layered, within

_NEAREST = 1e-30
"""Of λ × all seconds: below it, losses are t² alone; squares of smaller numbers would vanish."""
_FARTHEST = 670.0
"""Of λ × the longest block: beyond it, losses are hardly floats, and the longest block is all that counts."""
_RESOLUTION, _NEGLIGIBLE = 1e-15, 1e-100
"""Of a position and of all seconds: places that are no farther from each other are at once."""
_FEW_EVALUATIONS = 60_000
_FEW_PLACES = 12_000
"""Of a loop: so many are solved as if unrolled."""
_STOPS = 300
"""Checkpoints of a period, and its iterations, at least: what is left of its allowance is less than one."""


@dataclass(frozen=True)
class Placement:
    """Which places become checkpoints; all times in seconds."""

    chosen: tuple[int, ...]
    """Indices of places, rising. None is there that saves nothing, as one at the very end would."""
    loss: float
    """Expected, of all blocks together; infinite where no float is large enough."""
    spent: float
    """On checkpoints."""
    allowed: float
    bound: float
    """No placement within the allowance loses less."""
    price: float
    """What one more second of allowance would save, in seconds of loss; 0 where all places are chosen."""

    @property
    def gap(self) -> float:
        """By what part of it `loss` may be more than the least possible: 0 where costs are equal."""
        if self.loss <= self.bound:
            return 0.0
        return (self.loss - self.bound) / self.loss if self.loss < math.inf else 1.0


def place(
    times: Sequence[float], costs: Sequence[float], rate: float, overhead: float, cost: Cost = "exact"
) -> Placement:
    """The placement with the least expected loss within the allowance (paper 000 §2.2, and unequal costs).

    `times[i]`: seconds from place i − 1 to place i; there is one more of them than of places, the last for
    what is behind the last place. `costs[i]`: seconds that a checkpoint at place i takes. `rate`: failures
    per second. `overhead`: allowed seconds of checkpoints for each second of the program.

    Exact where costs are equal. Where not, choosing is a knapsack problem: `bound` and `gap` say how good the
    answer is. Where even the best longest block has λt > 670, the longest block is made as short as can be.

    Raises ValueError, in one sentence, for numbers that are negative or not finite, and for another number of
    times than of costs + 1.
    """
    times, costs = _checked(times, costs)
    rate, overhead = quantity("failure rate", rate), quantity("overhead", overhead)
    return place_within(times, costs, rate, _allowance(overhead, _total(times)), cost)


def _checked(times: Sequence[float], costs: Sequence[float]) -> tuple[list[float], list[float]]:
    times = [quantity(f"time {index}", value) for index, value in enumerate(times)]
    costs = [quantity(f"cost of place {index}", value) for index, value in enumerate(costs)]
    if len(times) != len(costs) + 1:
        raise ValueError(
            f"There are {len(times)} times for {len(costs)} places; pass one more than there are places: the "
            "last is that from the last place to the end."
        )
    return times, costs


@dataclass(frozen=True)
class Periodic:
    """Which hints of a loop become checkpoints, as a period that is repeated and a tail; times in seconds."""

    iterations: int
    period: int
    """In iterations."""
    chosen: tuple[tuple[int, int], ...]
    """(iteration, hint) within each period, rising."""
    repeats: int
    tail: tuple[tuple[int, int], ...]
    """(iteration, hint), with iterations counted from the end of the last period."""
    loss: float
    spent: float
    allowed: float

    @property
    def count(self) -> int:
        """Checkpoints in all."""
        return self.repeats * len(self.chosen) + len(self.tail)

    def takes(self, iteration: int, hint: int) -> bool:
        """Whether there is a checkpoint at this hint of this iteration, both counted from 0."""
        begun = self.repeats * self.period
        among, wanted = self.tail, (iteration - begun, hint)
        if iteration < begun:
            among, wanted = self.chosen, (iteration % self.period, hint)
        index = bisect_left(among, wanted)
        return index < len(among) and among[index] == wanted


def place_periodic(
    times: Sequence[float],
    costs: Sequence[float],
    rate: float,
    overhead: float,
    iterations: int,
    cost: Cost = "exact",
) -> Periodic:
    """The placement for a loop, in time that does not depend on `iterations` (paper 000 §5.3.2).

    `times` and `costs` are those of one iteration's body, as for `place`. A loop of few hints is solved as if
    unrolled; else a period of some hundred checkpoints is, without hints that lie closer to each other than
    about a fortieth of what is between checkpoints. The loss is within 1 % of the unrolled optimum's, as long
    as blocks are shorter than the mean time between failures.

    Raises ValueError as `place` does, and for a number of iterations that is no whole number from 0 on.
    """
    times, costs = _checked(times, costs)
    rate, overhead = quantity("failure rate", rate), quantity("overhead", overhead)
    curve_of(cost)
    if isinstance(iterations, bool) or not isinstance(iterations, int):
        raise ValueError(f"The number of iterations is {iterations!r}; pass a whole number from 0 on.")
    quantity("number of iterations", iterations)
    loop = _Loop(times, costs, rate, cost, _total(times), overhead)
    quantity("time of all iterations", loop.body * iterations)
    quantity("cost of all iterations", summed(costs) * iterations)
    return loop.placed(iterations)


def place_within(
    times: Sequence[float], costs: Sequence[float], rate: float, allowed: float, cost: Cost
) -> Placement:
    """`place`, for checked numbers, with the allowance in seconds."""
    curve = curve_of(cost)
    positions = [*accumulate(times)]
    places = _worth_choosing(positions, costs, allowed) if rate else []
    if not places:
        loss = _loss(times, (), rate, cost)
        return Placement((), loss, 0.0, allowed, loss, 0.0)
    solved = _solved(
        [positions[i] for i in places], [costs[i] for i in places], positions[-1], rate, allowed, curve
    )
    chosen = tuple(places[stop - 1] for stop in solved.found.path.stops)
    loss, spent = _loss(times, chosen, rate, cost), summed(costs[i] for i in chosen)
    if solved.longest is not None:
        bound = min(expected_loss(solved.longest, rate, cost), loss)
        return Placement(chosen, loss, spent, allowed, bound, math.inf)
    path, bound = solved.found.path, solved.found.bound
    part = bound / path.loss if bound < path.loss else 1.0
    worth = solved.found.price / path.loss * loss if path.loss else 0.0
    return Placement(chosen, loss, spent, allowed, loss * part, worth / solved.unit)


def _allowance(overhead: float, seconds: float) -> float:
    return min(overhead * seconds, sys.float_info.max)


def _total(times: Sequence[float]) -> float:
    if (total := summed(times)) == math.inf:
        raise ValueError("The times are too long to be added up; pass them in seconds.")
    return total


def _loss(times: Sequence[float], chosen: Sequence[int], rate: float, cost: Cost) -> float:
    cuts = [0, *(index + 1 for index in chosen), len(times)]
    return summed(expected_loss(summed(times[a:b]), rate, cost) for a, b in pairwise(cuts))


def _worth_choosing(positions: Sequence[float], costs: Sequence[float], allowed: float) -> list[int]:
    """Places that can be paid and end a block of some length; the cheapest one where several are at once."""
    end = positions[-1]
    found: list[int] = []
    last = 0.0
    for index, (position, cost) in enumerate(zip(positions, costs, strict=False)):
        if not _apart(0.0, position, end) or not _apart(position, end, end) or cost > allowed:
            continue
        if _apart(last, position, end):
            found.append(index)
        elif cost < costs[found[-1]]:
            found[-1] = index
        else:
            continue
        last = position
    return found


def _apart(earlier: float, later: float, end: float) -> bool:
    """By more than floats get wrong."""
    return later - earlier > _RESOLUTION * later + _NEGLIGIBLE * end


@dataclass(frozen=True)
class _Solved:
    found: Found
    unit: float
    """Seconds of cost in what the path's costs are counted in."""
    longest: float | None
    """Seconds that some block has in any placement, where these seconds were all that counted."""


def _solved(
    positions: Sequence[float], costs: Sequence[float], end: float, rate: float, allowed: float, curve: Curve
) -> _Solved:
    equal, unit = 0 < min(costs) == max(costs), 1.0
    if equal:
        unit = costs[0]
        costs, allowed = [1.0] * len(costs), float(_most(unit, len(costs), allowed))
    elif max(costs):
        unit = math.ldexp(1.0, math.frexp(max(costs))[1] - 1)  # a power of two: no digit is lost
        costs, allowed = [cost / unit for cost in costs], allowed / unit
    parts = [0.0, *(position / end for position in positions), 1.0]
    span, longest = max(rate * end, _NEAREST), None
    stops: tuple[int, ...] = ()
    if span > _FARTHEST:
        shortest, reached, stops = _evened(parts, costs, allowed)
        if reached * span > _FARTHEST:
            span, longest = _FARTHEST / reached, shortest * end
    line = Line([part * span for part in parts], costs, curve)
    if equal and allowed * line.end * math.log2(line.end) < _FEW_EVALUATIONS:
        return _Solved(layered(line, int(allowed)), unit, longest)
    found = within(line, allowed, line.path(stops))
    return _Solved(found if equal else closed(line, allowed, found), unit, longest)


def _evened(
    parts: Sequence[float], costs: Sequence[float], allowed: float
) -> tuple[float, float, tuple[int, ...]]:
    """The longest block made as short as can be: a bound, what is reached (to 0.1 %), and the stops."""
    low, high = max(b - a for a, b in pairwise(parts)), 1.0
    best: tuple[int, ...] = ()
    if (stops := _cheapest(parts, costs, allowed, low)) is not None:
        return low, low, stops
    while high > low * 1.001:
        middle = math.sqrt(low * high)
        stops = _cheapest(parts, costs, allowed, middle)
        if stops is None:
            low = middle
        else:
            high, best = middle, stops
    return low, high, best


def _cheapest(
    parts: Sequence[float], costs: Sequence[float], allowed: float, longest: float
) -> tuple[int, ...] | None:
    """The stops that cost least with no block longer than that; None if they cost more than allowed."""
    end = len(parts) - 1
    spent, came = [0.0] * (end + 1), [0] * (end + 1)
    queue = deque([0])  # beginnings within reach, each dearer than those before
    for place in range(1, end + 1):
        while parts[place] - parts[queue[0]] > longest:
            queue.popleft()
        came[place] = queue[0]
        spent[place] = spent[queue[0]] + (costs[place - 1] if place < end else 0.0)
        while queue and spent[queue[-1]] >= spent[place]:
            queue.pop()
        queue.append(place)
    stops, place = [], came[end]
    while place:
        stops.append(place)
        place = came[place]
    return tuple(reversed(stops)) if summed(costs[stop - 1] for stop in stops) <= allowed else None


def _most(cost: float, places: int, allowed: float) -> int:
    """Checkpoints that the allowance pays, rounded down (the paper rounds up)."""
    if cost * places <= allowed:
        return places
    count = int(allowed / cost)
    while count * cost > allowed:
        count -= 1
    return count + 1 if (count + 1) * cost <= allowed else count


@dataclass(frozen=True)
class _Loop:
    """A loop's body, for `place_periodic`."""

    times: Sequence[float]
    costs: Sequence[float]
    rate: float
    cost: Cost
    body: float
    """Seconds of an iteration."""
    overhead: float

    def placed(self, iterations: int) -> Periodic:
        allowed = _allowance(self.overhead, self.body * iterations)
        if not self.costs or not self.rate or min(self.costs) > allowed:
            loss = expected_loss(self.body * iterations, self.rate, self.cost)
            return Periodic(iterations, 0, (), 0, (), loss, 0.0, allowed)
        period = self._period(iterations)
        stride = max(1, -(-period // _FEW_PLACES))
        period = -(-period // stride) * stride
        if iterations < 3 * period or iterations * len(self.costs) <= _FEW_PLACES:
            return self._unrolled(iterations, self._hints(period), stride, allowed)
        return self._repeated(iterations, period, stride, allowed)

    def _period(self, iterations: int) -> int:
        """Iterations that pay so many of the cheapest checkpoints that it is no matter what is left over."""
        share, cheapest = self.overhead * self.body, min(self.costs)
        if share >= summed(self.costs):
            return 1
        if not cheapest:  # and so no block is longer than a body
            return min(iterations, _STOPS)
        return max(1, min(iterations, max(_STOPS, math.ceil(min(_STOPS * cheapest / share, iterations)))))

    def _hints(self, period: int) -> list[int]:
        """Of each stretch of the body that is short beside a block, the cheapest."""
        if len(self.costs) * period <= _FEW_PLACES:
            return list(range(len(self.costs)))
        stretches = max(1, _FEW_PLACES // period)
        cheapest: dict[int, int] = {}
        for hint, position in enumerate(self._positions()):
            stretch = min(int(position / self.body * stretches), stretches - 1)
            if self.costs[hint] < self.costs[cheapest.setdefault(stretch, hint)]:
                cheapest[stretch] = hint
        return sorted(cheapest.values())

    def _positions(self) -> list[float]:
        return list(accumulate(self.times[:-1]))

    def _at(self, place: tuple[int, int], positions: Sequence[float]) -> float:
        return place[0] * self.body + positions[place[1]]

    def _placed_between(
        self, begin: float, places: Sequence[tuple[int, int]], end: float, allowed: float
    ) -> tuple[list[tuple[int, int]], Placement]:
        positions = self._positions()
        ends = [begin, *(self._at(place, positions) for place in places), end]
        times = [max(b - a, 0.0) for a, b in pairwise(ends)]
        costs = [self.costs[hint] for _, hint in places]
        found = place_within(times, costs, self.rate, allowed, self.cost)
        return [places[index] for index in found.chosen], found

    def _unrolled(self, iterations: int, hints: Sequence[int], stride: int, allowed: float) -> Periodic:
        places = [(i, hint) for i in range(stride - 1, iterations, stride) for hint in hints]
        tail, found = self._placed_between(0.0, places, self.body * iterations, allowed)
        return Periodic(iterations, 0, (), 0, tuple(tail), found.loss, found.spent, allowed)

    def _repeated(self, iterations: int, period: int, stride: int, allowed: float) -> Periodic:
        hints, repeats = self._hints(period), iterations // period - 1
        chosen = self._cycle(hints, period, stride)
        paid = summed(self.costs[hint] for _, hint in chosen) * repeats
        positions = self._positions()
        cuts = [self._at(place, positions) for place in chosen]
        span = period * self.body
        left = iterations - repeats * period
        places = [(i, hint) for i in range(stride - 1, left, stride) for hint in hints]
        rest = max(allowed * (1 - 1e-15) - paid, 0.0)
        tail, found = self._placed_between(cuts[-1] - span, places, left * self.body, rest)
        lost = [expected_loss(b - a, self.rate, self.cost) for a, b in pairwise(cuts)]
        between = expected_loss(max(cuts[0] + span - cuts[-1], 0.0), self.rate, self.cost)
        loss = expected_loss(cuts[0], self.rate, self.cost) + found.loss
        loss += repeats * summed(lost) + (repeats - 1) * between
        spent = paid + found.spent
        return Periodic(iterations, period, tuple(chosen), repeats, tuple(tail), loss, spent, allowed)

    def _cycle(self, hints: Sequence[int], period: int, stride: int) -> list[tuple[int, int]]:
        """The best of what begins and ends with the cheapest hint, an integral number of iterations later."""
        anchor = min(hints, key=lambda hint: self.costs[hint])
        begin, end = (-1, anchor), (period - 1, anchor)
        steps = [-1, *range(stride - 1, period, stride)]
        places = [(i, hint) for i in steps for hint in hints if begin < (i, hint) < end]
        allowed = _allowance(self.overhead, self.body * period) - self.costs[anchor]
        positions = self._positions()
        inside, _ = self._placed_between(
            self._at(begin, positions), places, self._at(end, positions), max(allowed, 0.0)
        )
        return sorted((i % period, hint) for i, hint in [*inside, end])
