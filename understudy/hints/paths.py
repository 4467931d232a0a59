"""Which places become checkpoints, as shortest paths along a line: the algorithms behind `placement`.

A `Line` has a beginning, places in the order of their positions, and an end. A *path* is the places that it
stops at; it loses what its blocks lose. Losses of blocks are convex, so they satisfy the quadrangle
inequality, and the best place to come from never moves back as the place to go to moves on. That makes

- `layered`, for exactly k stops: divide and conquer, O(n log n) a layer and not the O(n²) of paper 000 §2.2;
- `priced`, for stops that each have a price: a queue of beginnings, each with the position from which on it
  is the best. O(n) for any number of stops, because `Curve.overtaking` says that position without a search;
- `within`, for an allowance: the price at which it is spent (a Lagrange multiplier), and a bound that proves
  how good the answer is.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from .cost import Curve, summed

_ROUNDING = 1e-13
"""Of a path's loss and price together: what their sums may be wrong by."""
_TOLERANCE = 1e-12
"""Of a loss: what is no nearer to its bound counts as best."""
_MOST_PRICES = 300
_SWEEPS = 6


@dataclass(frozen=True)
class Line:
    """Where the places are, and what stopping there costs."""

    at: Sequence[float]
    """Positions, without units (λ × time): 0, then those of the places in rising order, then the end."""
    costs: Sequence[float]
    """Of the places: of `at[1]`, `at[2]`, …"""
    curve: Curve

    @property
    def end(self) -> int:
        return len(self.at) - 1

    def loss(self, stops: Sequence[int]) -> float:
        """Of a path that stops at these indices of `at`."""
        block, at = self.curve.loss, self.at
        ends = [0, *stops, self.end]
        return summed(block(at[b] - at[a]) for a, b in pairwise(ends))

    def spent(self, stops: Sequence[int]) -> float:
        return summed(self.costs[stop - 1] for stop in stops)

    def path(self, stops: Sequence[int]) -> Path:
        return Path(tuple(stops), self.loss(stops), self.spent(stops))


@dataclass(frozen=True)
class Path:
    """Indices of `Line.at` that are stopped at, without beginning and end; their loss and their cost."""

    stops: tuple[int, ...]
    loss: float
    spent: float


@dataclass(frozen=True)
class Found:
    """A path, a loss that none within the allowance goes below, and what a unit of cost is worth."""

    path: Path
    bound: float
    price: float


def layered(line: Line, count: int) -> Found:
    """The best path with exactly so many stops: divide and conquer, a layer for each (paper 000 §2.2)."""
    best, end = [line.curve.loss(x) for x in line.at], line.end
    losses, came = [best[end]], []
    for layer in range(1, count + 1):
        best, parents = _next_layer(line, best, layer, end if layer == count else layer + 1)
        losses.append(best[end])
        came.append(parents)
    stops, place = [], end
    for parents in reversed(came):
        place = parents[place]
        stops.append(place)
    path = line.path(stops[::-1])
    return Found(path, path.loss, losses[-2] - losses[-1])


def _next_layer(line: Line, before: list[float], layer: int, first: int) -> tuple[list[float], list[int]]:
    """Best losses with one stop more, to the places from `first` on, and where each comes from."""
    block, at, end = line.curve.loss, line.at, line.end
    best, parents = [math.inf] * (end + 1), [0] * (end + 1)
    waiting = [(first, end, layer, end - 1)]
    while waiting:
        low, high, begin, stop = waiting.pop()
        middle = (low + high) // 2
        x = at[middle]
        least, parent = math.inf, min(stop, middle - 1)
        for place in range(begin, min(stop, middle - 1) + 1):
            value = before[place] + block(x - at[place])
            if value < least:
                least, parent = value, place
        best[middle], parents[middle] = least, parent
        if low < middle:
            waiting.append((low, middle - 1, begin, parent))
        if middle < high:
            waiting.append((middle + 1, high, parent, stop))
    return best, parents


def priced(line: Line, price: float) -> Path:
    """The path with the least loss + price × cost, whatever the number of its stops."""
    block, overtaking, at, costs, end = line.curve.loss, line.curve.overtaking, line.at, line.costs, line.end
    total, came = [0.0] * (end + 1), [0] * (end + 1)
    queue, since = [0], [0.0]  # beginnings, and the position from which on each is the best
    front = 0
    for place in range(1, end):
        x = at[place]
        while front + 1 < len(queue) and since[front + 1] < x:
            front += 1
        begin = came[place] = queue[front]
        value = total[place] = total[begin] + block(x - at[begin]) + price * costs[place - 1]
        while True:
            rival = queue[-1]
            better_from = x + overtaking(x - at[rival], value - total[rival])
            if better_from > since[-1] and better_from > x:
                queue.append(place)
                since.append(better_from)
                break
            if len(queue) == front + 1:
                queue[-1], since[-1] = place, x
                break
            queue.pop()
            since.pop()
    while front + 1 < len(queue) and since[front + 1] < at[end]:
        front += 1
    stops, place = [], queue[front]
    while place:
        stops.append(place)
        place = came[place]
    return line.path(stops[::-1])


def within(line: Line, allowed: float, known: Path) -> Found:
    """A path that costs no more than `allowed`, and a bound. `known`: one such path, with a finite loss.

    It is the best one where all places cost the same; else the best of those that the right price gives, of
    all that begin as one of them and go on as another, and of what small changes make of these.
    """
    everything = line.path(range(1, line.end))
    if everything.spent <= allowed:
        return Found(everything, everything.loss, 0.0)
    search = _Search(line, allowed, everything, known)
    while search.step():
        pass
    best = _spliced(line, search.over, search.under, allowed)
    best = min(best, search.best, key=lambda path: path.loss)
    if min(line.costs) < max(line.costs) and best.loss > search.bound * (1 + _TOLERANCE):
        best = improved(line, best, allowed)
    proven = best.loss <= search.bound * (1 + _TOLERANCE)
    return Found(best, best.loss if proven else search.bound, search.price)


class _Search:
    """For the price at which the allowance is spent: between a path that costs too much and one that fits.

    At each price the best path gives a bound, loss + price × (cost − allowed), and the best bound is at the
    price at which both paths are best (the *kink*): from there, either another path proves better, or the
    search is over. Prices that are guessed from how cost falls with price shorten the way.
    """

    def __init__(self, line: Line, allowed: float, over: Path, under: Path) -> None:
        self.line, self.allowed = line, allowed
        self.over, self.over_price = over, 0.0
        self.under, self.under_price = under, math.inf
        self.best = under
        self.bound, self.price = over.loss, 0.0
        self._steps = 0

    def step(self) -> bool:
        """Whether to go on."""
        self._steps += 1
        kink = max(self.under.loss - self.over.loss, 0.0) / (self.over.spent - self.under.spent)
        guess = self._guess() if self._steps % 3 else None
        price = kink if guess is None else guess
        path = priced(self.line, price)
        value = path.loss + price * path.spent
        bound = path.loss + price * (path.spent - self.allowed) - _ROUNDING * value
        if bound > self.bound:
            self.bound, self.price = bound, price
        at_kink = value >= (self.under.loss + price * self.under.spent) * (1 - _ROUNDING)
        moved = self._take(path, price)
        done = self.best.loss <= self.bound * (1 + _TOLERANCE)
        stuck = guess is None and (at_kink or not moved)
        return not (done or stuck) and self._steps < _MOST_PRICES

    def _take(self, path: Path, price: float) -> bool:
        """Whether the search is narrower now."""
        if path.spent > self.allowed:
            if path.spent >= self.over.spent:
                return False
            self.over, self.over_price = path, price
            return True
        if path.loss < self.best.loss:
            self.best = path
        narrower = (path.spent, -path.loss) > (self.under.spent, -self.under.loss)
        if not narrower and self.under_price < math.inf:
            return False
        self.under, self.under_price = path, price
        return True

    def _guess(self) -> float | None:
        """From how cost falls with price: as a power of it, or, to begin with, as with places everywhere."""
        low, high = self.over_price, self.under_price
        if low > 0 and high < math.inf and 0 < self.under.spent < self.allowed:
            part = math.log(self.over.spent / self.allowed) / math.log(self.over.spent / self.under.spent)
            price = low * (high / low) ** min(max(part, 0.02), 0.98)
        elif self._steps == 1:
            price = self._price_of_even_blocks()
        else:
            return None
        return price if low < price < high else None

    def _price_of_even_blocks(self) -> float:
        line, length = self.line, self.line.at[-1]
        cost = self.over.spent / len(line.costs)
        even = length / (self.allowed / cost + 1)
        longer, shorter = even * 1.001, even / 1.001
        gained = length / longer * line.curve.loss(longer) - length / shorter * line.curve.loss(shorter)
        return gained / (cost * length * (1 / shorter - 1 / longer))


def _spliced(line: Line, fine: Path, coarse: Path, allowed: float) -> Path:
    """The best allowed path that begins as one of the two and goes on as the other.

    Where both are best at the same price and all costs are equal, one of these has exactly as many stops as
    are allowed, and is best (A. Aggarwal, B. Schieber, T. Tokuyama: Finding a minimum-weight k-link path in
    graphs with the concave Monge property, 1994).
    """
    joined = [_joined(line, coarse, fine, allowed), _joined(line, fine, coarse, allowed)]
    paths = [line.path(stops) for stops in joined]
    return min([coarse, *(path for path in paths if path.spent <= allowed)], key=lambda path: path.loss)


def _joined(line: Line, head: Path, tail: Path, allowed: float) -> tuple[int, ...]:
    block, at = line.curve.loss, line.at
    heads, tails = (0, *head.stops, line.end), (0, *tail.stops, line.end)
    lost, lost_after = _losses(line, heads), _losses(line, tails)
    paid, paid_after = _payments(line, heads), _payments(line, tails)
    best, joint = math.inf, (len(heads) - 2, len(tails) - 1)
    first = 1
    for h in range(len(heads) - 1):
        while tails[first] <= heads[h]:
            first += 1
        t = first
        while True:
            spent = paid[h] + paid_after[-1] - paid_after[t - 1]
            loss = lost[h] + block(at[tails[t]] - at[heads[h]]) + lost_after[-1] - lost_after[t]
            if spent <= allowed and loss < best:
                best, joint = loss, (h, t)
            t += 1
            if t == len(tails) or tails[t] > heads[h + 1]:
                break
    h, t = joint
    return (*heads[1 : h + 1], *tails[t:-1])


def _losses(line: Line, ends: Sequence[int]) -> list[float]:
    """From the beginning to each end of a block."""
    block, at = line.curve.loss, line.at
    return list(accumulate((block(at[b] - at[a]) for a, b in pairwise(ends)), initial=0.0))


def _payments(line: Line, ends: Sequence[int]) -> list[float]:
    """For all stops up to each end of a block, that one included."""
    return [0.0, *accumulate(line.costs[stop - 1] for stop in ends[1:-1])]


def improved(line: Line, path: Path, allowed: float) -> Path:
    """What is left of the allowance is spent, and each stop is moved, where it saves most."""
    for _ in range(_SWEEPS):
        better = _moved(line, _added(line, path, allowed), allowed)
        if better.loss >= path.loss:
            break
        path = better
    return path


def _added(line: Line, path: Path, allowed: float) -> Path:
    """Greedily, by loss saved for cost. What a stop saves only falls as others are added."""
    ends, left = [0, *path.stops, line.end], allowed - path.spent
    taken = set(ends)
    waiting = [
        (-math.inf, place)
        for place in range(1, line.end)
        if place not in taken and line.costs[place - 1] <= left
    ]
    while waiting:
        claimed, place = waiting[0]
        cost = line.costs[place - 1]
        after = bisect_left(ends, place)
        ratio = _saved(line, ends[after - 1], place, ends[after]) / cost if cost else math.inf
        if cost > left or ratio <= 0:
            heapq.heappop(waiting)
        elif ratio < -claimed:
            heapq.heapreplace(waiting, (-ratio, place))
        else:
            heapq.heappop(waiting)
            grown = line.path([*ends[1:after], place, *ends[after:-1]])
            if grown.spent <= allowed:
                path, left = grown, allowed - grown.spent
                ends.insert(after, place)
    return path


def _saved(line: Line, begin: int, place: int, end: int) -> float:
    block, at = line.curve.loss, line.at
    return block(at[end] - at[begin]) - block(at[place] - at[begin]) - block(at[end] - at[place])


def _moved(line: Line, path: Path, allowed: float) -> Path:
    """Each stop, one after the other, to the best place between its neighbours that can be paid."""
    block, at, costs = line.curve.loss, line.at, line.costs
    ends, left = [0, *path.stops, line.end], allowed - path.spent
    for index in range(1, len(ends) - 1):
        before, stop, after = ends[index - 1 : index + 2]
        most = costs[stop - 1] + left
        least, best = block(at[stop] - at[before]) + block(at[after] - at[stop]), stop
        for place in range(before + 1, after):
            if costs[place - 1] <= most:
                loss = block(at[place] - at[before]) + block(at[after] - at[place])
                if loss < least:
                    least, best = loss, place
        if best != stop:
            left += costs[stop - 1] - costs[best - 1]
            ends[index] = best
    moved = line.path(ends[1:-1])
    return moved if moved.spent <= allowed and moved.loss < path.loss else path
