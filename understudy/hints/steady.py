"""Where a loop takes its checkpoints that goes on as it has done: the best of all ways to go on for ever.

A checkpoint at one hint of the body, and the next one at the same or another hint, some iterations later, is
an edge; a way to go on for ever is a circle of edges. At a price for each second of checkpoints, the best
circle has the least loss and payment per second of the program (Howard's policy iteration for circles of
least ratio). The price is the one at which the allowance is spent. There two circles are best, one that
spends more and one that spends less, and going now by the one, now by the other is best of all (paper 000
§5.3.2 asks for such a loop "as is"; nothing here depends on how many iterations there are, or how many of
them a block has).

Losses are convex. So whether to take a hint depends on the seconds since the last checkpoint alone: from some
number of them on it is taken. These numbers are what a running program needs, for both of the circles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from .cost import Cost, Curve, curve_of

_LONGEST = 100.0
"""Of λ × the average block: beyond it, hardly a block gets through, and no placement helps."""
_BROADER = 0.07
"""By which part the prices of the two ways lie beside the one at which the allowance is spent. Losses hardly
differ for it, and no checkpoint of theirs is a draw there, which the smallest delay would decide
otherwise."""
_TOLERANCE = 1e-6
"""Of what a second loses and pays."""
_MOST_PRICES, _MOST_ROUNDS = 60, 60
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Steady:
    """How to go on: two ways, in turns; for each hint of the body, in its order.

    The denser way spends the allowance or more, the sparser one the allowance or less.
    """

    denser: tuple[float, ...]
    """Seconds since the last checkpoint, from which on the hint is taken."""
    sparser: tuple[float, ...]
    reserve: tuple[float, ...]
    """Seconds of checkpoints that must be saved up behind a checkpoint at the hint, so that its next one may
    be the denser way's, and those behind it the sparser way's.
    """
    loss: float
    """Per second of the program, of both ways in turns such that the allowance is spent. No placement loses
    less."""
    spent: float
    """Seconds of checkpoints per second of the program."""


def steady(
    times: Sequence[float], costs: Sequence[float], rate: float, overhead: float, cost: Cost = "exact"
) -> Steady | None:
    """The best way to go on in a loop whose body has one hint or more; None where there is no telling.

    `times[i]`: seconds to hint i from the one before it, for the first from the last of the iteration before.
    `costs[i]`: seconds of a checkpoint there. `rate`: failures per second. `overhead`: allowed seconds of
    checkpoints for each second of the program. All finite, and none negative.
    """
    curve, body = curve_of(cost), math.fsum(times)
    if not costs or not rate or not overhead or not body:
        return None
    whole = math.fsum(costs)
    if rate * max(whole / len(costs) / overhead, body) > _LONGEST:
        return None
    if whole <= overhead * body:
        lost = math.fsum(curve.loss(rate * seconds) for seconds in times)
        each = (0.0,) * len(costs)
        return Steady(each, each, each, lost / (rate * body), whole / body)
    loop = _Loop([*accumulate(rate * t for t in times)], [rate * c for c in costs], curve)
    price, loss, spent = _price(loop, overhead)
    if not price < math.inf:
        return None
    dense, sparse = (loop.best(price * factor) for factor in (1 - _BROADER, 1 + _BROADER))
    denser, sparser = _least(loop, dense), _least(loop, sparse)
    reserve = _reserve(loop, overhead, _edges(loop, denser), _edges(loop, sparser))
    denser, sparser, reserve = ([x / rate for x in each] for each in (denser, sparser, reserve))
    return Steady(tuple(denser), tuple(sparser), tuple(reserve), loss, spent)


@dataclass(frozen=True)
class _Best:
    """The best circle at a price, and what each hint as the last checkpoint is worth beside the others."""

    price: float
    value: float
    """Loss and payment for each second of the circle."""
    loss: float
    spent: float
    ahead: list[float]
    """Of going on from each hint, less `value` for each second."""
    to: list[int]
    span: list[float]
    """The edge from each hint: to which, and how far away."""


class _Loop:
    """A body without units (λ × seconds)."""

    def __init__(self, at: list[float], costs: list[float], curve: Curve) -> None:
        self.at, self.costs, self.curve = at, costs, curve
        self.body = at[-1]
        self.hints = range(len(costs))

    def apart(self, begin: int, end: int) -> float:
        """From a hint to the next time that the other one, or it itself, is reached."""
        distance = self.at[end] - self.at[begin]
        return distance if end > begin else distance + self.body

    def best(self, price: float) -> _Best:
        """Policy iteration: from each hint an edge, the best circle of these, better edges beside it."""
        each, nothing = [self.body for _ in self.hints], [0.0 for _ in self.hints]
        found = self._valued(price, list(self.hints), each, nothing)
        for _ in range(_MOST_ROUNDS):
            new = [self._edge(begin, found) for begin in self.hints]
            if all(edge is None for edge in new):
                break
            to = [found.to[i] if edge is None else edge[0] for i, edge in enumerate(new)]
            span = [found.span[i] if edge is None else edge[1] for i, edge in enumerate(new)]
            found = self._valued(price, to, span, found.ahead)
        return found

    def _edge(self, begin: int, found: _Best) -> tuple[int, float] | None:
        """The best one from a hint; None if it is no better than the one that there is."""
        loss, value, body = self.curve.loss, found.value, self.body
        turning = self.curve.overtaking(body, value * body)
        """From here on, another iteration costs more than it is worth."""
        before = self._through(begin, found.to[begin], found.span[begin], found)
        least, edge = before - _ROUNDING * (abs(before) + value * body), None
        for end in self.hints:
            x = self.apart(begin, end)
            if x < turning:
                x += math.ceil((turning - x) / body) * body
            through = loss(x) + found.price * self.costs[end] - value * x + found.ahead[end]
            if through < least:
                least, edge = through, (end, x)
        return edge

    def _through(self, begin: int, end: int, x: float, found: _Best) -> float:
        return self.curve.loss(x) + found.price * self.costs[end] - found.value * x + found.ahead[end]

    def _valued(self, price: float, to: list[int], span: list[float], before: list[float]) -> _Best:
        """The best circle of these edges; `ahead` of all that lead there, and as it was of the others."""
        value, circle = math.inf, [0]
        seen: set[int] = set()
        for begin in self.hints:
            path: dict[int, None] = {}
            at = begin
            while at not in seen:
                seen.add(at)
                path[at] = None
                at = to[at]
            if at in path:
                own = list(path)[list(path).index(at) :]
                time = sum(span[hint] for hint in own)
                paid = sum(self.curve.loss(span[hint]) + price * self.costs[to[hint]] for hint in own)
                if paid / time < value:
                    value, circle = paid / time, own
        ahead, leading = list(before), [circle[0]]
        ahead[circle[0]] = 0.0
        known = {circle[0]}
        for end in leading:
            for begin in self.hints:
                if to[begin] == end and begin not in known:
                    edge = self.curve.loss(span[begin]) + price * self.costs[end] - value * span[begin]
                    ahead[begin] = edge + ahead[end]
                    known.add(begin)
                    leading.append(begin)
        time = sum(span[hint] for hint in circle)
        loss = sum(self.curve.loss(span[hint]) for hint in circle) / time
        spent = sum(self.costs[to[hint]] for hint in circle) / time
        return _Best(price, value, loss, spent, ahead, to, span)


def _price(loop: _Loop, overhead: float) -> tuple[float, float, float]:
    """At which the allowance is spent; what a second then loses, and what it spends."""
    price = _of_even_blocks(loop, overhead)
    dense = sparse = loop.best(price)
    for _ in range(_MOST_PRICES):
        if dense.spent >= overhead >= sparse.spent:
            break
        if dense.spent < overhead:
            dense = loop.best(dense.price / 2)
        if sparse.spent > overhead:
            sparse = loop.best(sparse.price * 2)
    else:
        return math.inf, 0.0, 0.0
    for step in range(_MOST_PRICES):
        if dense.spent - sparse.spent <= _TOLERANCE * overhead:
            return sparse.price, sparse.loss, sparse.spent
        kink = (sparse.loss - dense.loss) / (dense.spent - sparse.spent)
        middle = math.sqrt(dense.price * sparse.price)
        found = loop.best(middle if step % 3 == 2 and dense.price < middle < sparse.price else kink)
        if found.price == kink and found.value >= (dense.loss + kink * dense.spent) * (1 - _TOLERANCE):
            break
        if found.spent > overhead:
            dense = found
        else:
            sparse = found
    part = (overhead - sparse.spent) / (dense.spent - sparse.spent)
    return kink, sparse.loss + part * (dense.loss - sparse.loss), overhead


def _of_even_blocks(loop: _Loop, overhead: float) -> float:
    """The price at which blocks that all hints' average cost allows are best, if hints were everywhere."""
    cost = math.fsum(loop.costs) / len(loop.costs)
    x = cost / overhead
    slope = (loop.curve.loss(1.001 * x) - loop.curve.loss(0.999 * x)) / (0.002 * x)
    return max((x * slope - loop.curve.loss(x)) / cost, 1e-300)


def _edges(loop: _Loop, least: list[float]) -> list[tuple[int, float]]:
    """Behind each hint, which one is the first to be taken, and how far away that is."""

    def reached(begin: int, end: int) -> float:
        x = loop.apart(begin, end)
        return (
            x + max(0, math.ceil((least[end] - x) / loop.body)) * loop.body
            if least[end] < math.inf
            else math.inf
        )

    found = []
    for begin in loop.hints:
        x, end = min((reached(begin, end), end) for end in loop.hints)
        found.append((end, x))
    return found


def _reserve(
    loop: _Loop, overhead: float, dense: list[tuple[int, float]], sparse: list[tuple[int, float]]
) -> list[float]:
    """`Steady.reserve`, without units."""
    needed = [0.0 for _ in loop.hints]
    for begin in loop.hints:
        paid, at, way = 0.0, begin, dense
        for _ in range(2 * len(loop.costs)):
            at, x = way[at]
            paid, way = paid + loop.costs[at] - overhead * x, sparse
            needed[begin] = max(needed[begin], paid)
    return needed


def _least(loop: _Loop, best: _Best) -> list[float]:
    """`Steady.denser` and `.sparser`, without units: from where on a hint is better than each later one.

    No later one but those of an iteration need be looked at: if waiting for another iteration is worth it for
    one of them, it is for this hint itself, because losses are convex.
    """
    return [max(_overtaken(loop, best, hint, later) for later in loop.hints) for hint in loop.hints]


def _overtaken(loop: _Loop, best: _Best, hint: int, later: int) -> float:
    distance = loop.apart(hint, later)
    debt = best.price * (loop.costs[hint] - loop.costs[later]) + best.ahead[hint] - best.ahead[later]
    debt += best.value * distance
    if distance:
        return loop.curve.overtaking(distance, debt)
    return math.inf if debt > 0 else 0.0
