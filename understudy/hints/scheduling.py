"""Whether a hint that the program has just reached becomes a checkpoint, from times measured as it runs.

No clock is read here: times are told. The allowance is a bank: each second of the program pays `overhead`
seconds in, and a checkpoint is taken only when it can be paid. Where all checkpoints cost about the same and
hints are close to each other, taking each as soon as it can be paid spaces them evenly, which is best.
Elsewhere, a plan over the recent past (`placement`) says what a second of allowance is worth, and a
checkpoint waits if one of the hints that are expected next serves better. (Better for the block that it
ends: what its choice means for the blocks behind is not looked at.)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterator
from itertools import pairwise
from statistics import median

from .cost import Cost, curve_of, expected_loss, quantity, summed
from .placement import place_within

_REMEMBERED = 256
"""Hints, in the order in which they were reached."""
_AHEAD = 64
_FIRST_PLAN = 16
_MEASUREMENTS = 9
_FULL = 3
"""Checkpoints that can be paid at once: more is not saved up, because waiting saves nothing any more."""
_CLOSE = 8
"""Hints for each checkpoint: where there are more, it is no matter how they are spaced."""
_ALIKE = 1.1
"""Costs that differ by no more than this factor are taken to be the same."""


class Scheduler:
    """Follows the program from hint to hint, and keeps its allowance.

        scheduler = Scheduler(rate=1 / 3600, overhead=0.03)
        if scheduler.due("line 12", seconds_since_last_checkpoint, measured_cost=None):
            ...                             # save
            scheduler.saved(seconds)        # what it has really cost

    Seconds of checkpoints are at most `overhead` × the program's own seconds at every moment, as far as
    costs were known: one that turns out dearer is made up for by those that follow.
    """

    def __init__(
        self, rate: float, overhead: float, cost: Cost = "exact", *, unmeasured: float = 0.1
    ) -> None:
        """`rate`: failures per second. `unmeasured`: seconds that a first checkpoint is taken to cost.

        Raises ValueError for numbers that are negative or not finite, and for a cost that there is not.
        """
        curve_of(cost)
        self.rate, self.overhead = quantity("failure rate", rate), quantity("overhead", overhead)
        self.cost: Cost = cost
        self.elapsed = 0.0
        """Seconds of the program, without those of checkpoints."""
        self.spent = 0.0
        """Seconds of checkpoints."""
        self._unmeasured = quantity("cost of a checkpoint", unmeasured)
        self._since = 0.0
        self._taken: tuple[Hashable, float] | None = None
        self._costs: dict[Hashable, deque[float]] = {}
        self._steps: dict[tuple[Hashable, Hashable], deque[float]] = {}
        self._places: list[Hashable] = []
        self._matches: list[int] = []
        """For each remembered hint, how many hints up to it are the same as the last ones of all."""
        self._hints = self._checkpoints = 0
        self._until_plan = _FIRST_PLAN
        self._planned = 0
        self._worth = 0.0
        self._mean = 0.0

    @property
    def allowed(self) -> float:
        """Seconds of checkpoints, up to now."""
        return self.overhead * self.elapsed

    def due(self, place: Hashable, since: float, measured_cost: float | None = None) -> bool:
        """Whether to save at `place` now; if so, the checkpoint counts as paid, and `saved` is to be called.

        `since`: the program's seconds since the last checkpoint ended, or since the beginning.
        `measured_cost`: seconds that a checkpoint here takes, as far as whoever calls knows; else the median
        of what `saved` was told.
        """
        since = quantity("time since the last checkpoint", since)
        cost = None if measured_cost is None else quantity("cost of a checkpoint", measured_cost)
        self._reached(place, since)
        if cost is None:
            cost = self._cost(place)
        else:
            self._measured(place, cost)
        if not self.rate or self.spent + cost > self.allowed or self._waits(place, since, cost):
            return False
        self.spent += cost
        self._checkpoints += 1
        self._taken = (place, cost)
        return True

    def saved(self, seconds: float) -> None:
        """What the checkpoint that was due last has really cost."""
        seconds = quantity("cost of a checkpoint", seconds)
        if self._taken is None:
            raise ValueError("No checkpoint was due, so none was saved; call `due` first.")
        place, counted = self._taken
        self._since, self._taken = 0.0, None
        self.spent = max(self.spent + seconds - counted, 0.0)
        self._measured(place, seconds)

    def _measured(self, place: Hashable, seconds: float) -> None:
        self._costs.setdefault(place, deque(maxlen=_MEASUREMENTS)).append(seconds)

    def _cost(self, place: Hashable) -> float:
        known = self._costs.get(place)
        if known:
            return median(known)
        others = [median(costs) for costs in self._costs.values()]
        return median(others) if others else self._unmeasured

    def _reached(self, place: Hashable, since: float) -> None:
        step = since - self._since if since >= self._since else since
        self._since = since
        self.elapsed += step
        self._until_plan -= 1
        self._hints += 1
        if self._places:
            pair = (self._places[-1], place)
            self._steps.setdefault(pair, deque(maxlen=_MEASUREMENTS)).append(step)
        longer = zip([0, *self._matches], self._places, strict=False)
        self._matches = [match + 1 if known == place else 0 for match, known in longer]
        self._places.append(place)
        self._matches.append(0)
        del self._places[:-_REMEMBERED], self._matches[:-_REMEMBERED]

    def _waits(self, place: Hashable, since: float, cost: float) -> bool:
        """Whether a hint that is expected serves better than this one."""
        costs = {known: self._cost(known) for known in set(self._places)}
        alike = max(costs.values()) <= _ALIKE * min(costs.values())
        if alike and self._hints > _CLOSE * self._checkpoints:
            return False
        if self._until_plan <= 0:
            self._plan(costs)
        if not self._planned or self.allowed - self.spent >= _FULL * cost:
            return False
        now = self._value(since, cost)
        return any(self._value(later, costs[known]) < now for known, later in self._expected(since))

    def _value(self, since: float, cost: float) -> float:
        """What a block that ends here loses and pays, against one of average length and cost."""
        return expected_loss(since, self.rate, self.cost) + self._worth * cost - self._mean * since

    def _plan(self, costs: dict[Hashable, float]) -> None:
        """From the past: what a second of allowance is worth, and what a second loses and pays on average."""
        self._planned = self._until_plan = min(2 * self._planned or _FIRST_PLAN, 4 * _REMEMBERED)
        times = [median(self._steps[pair]) for pair in pairwise(self._places)]
        total = summed(times)
        within = [costs[place] for place in self._places[1:-1]]
        found = place_within(times, within, self.rate, self.overhead * total, self.cost)
        if total and found.price < math.inf and found.loss < math.inf:
            self._worth = found.price
            self._mean = (found.loss + found.price * found.spent) / total

    def _expected(self, since: float) -> Iterator[tuple[Hashable, float]]:
        """The hints that are likely to come next, and when: those that came after the longest same past."""
        longest = max(self._matches)
        if not longest:
            return
        at = len(self._matches) - 1 - self._matches[::-1].index(longest)
        for index in range(at, min(at + _AHEAD, len(self._places) - 1)):
            since += median(self._steps[self._places[index], self._places[index + 1]])
            yield self._places[index + 1], since
