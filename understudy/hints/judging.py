"""Each hint by itself, where no loop repeats itself: whether one of those that are expected next serves
better.

A plan over the recent past (`placement`) says what a second of allowance is worth, and what the program loses
and pays on average; a block is held against that. What the choice of its end means for the blocks behind is
not looked at: that takes a future that is known, as that of a steady loop is (`steady`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from .cost import Cost, expected_loss, summed
from .placement import place_within
from .recent import Place, Recent

_CONSIDERED = 256
"""Of the last hints, for a plan."""


class Judge:
    """Holds hints against an average block of what the program did before."""

    def __init__(self, rate: float, overhead: float, cost: Cost) -> None:
        self.rate, self.overhead, self.cost = rate, overhead, cost
        self._worth = self._average = 0.0
        self.planned = False

    def plan(self, recent: Recent, cost_at: Callable[[Place], float]) -> None:
        """From the past: what a second of allowance is worth, and what a second loses and pays on average."""
        places = recent.places[-_CONSIDERED:]
        times = [recent.between(*pair) for pair in pairwise(places)]
        costs: Sequence[float] = [cost_at(place) for place in places[1:-1]]
        total = summed(times)
        found = place_within(times, costs, self.rate, self.overhead * total, self.cost)
        if total and found.price < math.inf and found.loss < math.inf:
            self._worth = found.price
            self._average = (found.loss + found.price * found.spent) / total
        self.planned = True

    def waits(self, since: float, cost: float, recent: Recent, cost_at: Callable[[Place], float]) -> bool:
        """Whether a hint that is expected serves better than this one, `since` seconds behind a
        checkpoint."""
        if not self.planned:
            return False
        now = self._value(since, cost)
        return any(self._value(since + after, cost_at(place)) < now for place, after in recent.expected())

    def _value(self, since: float, cost: float) -> float:
        """What a block that ends here loses and pays, against one of average length and cost."""
        return expected_loss(since, self.rate, self.cost) + self._worth * cost - self._average * since
