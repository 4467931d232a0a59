"""Whether a hint that the program has just reached becomes a checkpoint, from times measured as it runs.

Times of the program are told, and the clock is read for one thing alone: what planning takes. The allowance
is a bank: each second of the program pays `overhead` seconds in, and a checkpoint is taken only when it can
be paid.

A loop that goes round in the same hints gets the best placement that there is for it (`steady`), from medians
of what its hints took and cost. It is solved anew when these have moved by a tenth, and when the iterations
since it was solved first have doubled. What is no steady loop (nothing has gone round twice yet, branches
come and go, an iteration has more hints than can be solved in time) has no future that is known well enough
to be placed in as a whole: there each hint is judged by itself (`judging`), and where hints are close to each
other and cost about the same, taking each as soon as it can be paid spaces them evenly, which is best.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from .cost import Cost, curve_of, quantity
from .judging import Judge
from .recent import Recent, median
from .steady import Steady, steady

_FIRST_PLAN, _LAST_PLAN = 16, 1024
"""Hints from one plan of the judge to the next, which double."""
_FIRST_LOOK, _LAST_LOOK = 8, 256
"""Hints from one look for a loop to the next, which double; a loop's medians are looked at as rarely."""
_MOST_HINTS = 64
"""Of a body that is solved: it takes the square of their number."""
_MOVED = 0.1
"""By this part, a median counts as another one."""
_MEASUREMENTS = 9
"""Of a checkpoint's cost, of which the median is taken."""
_FULL = 3
"""Checkpoints that can be paid at once: more is not saved up, because waiting saves nothing any more."""
_CLOSE = 8
"""Hints for each checkpoint: where there are more, it is no matter how they are spaced."""
_ALIKE = 1.1
"""Costs that differ by no more than this factor are taken to be the same."""
_PLANNING = 0.1
"""Of the allowance, that planning may take."""
_SECONDS_OF_A_PAIR, _SECONDS_OF_A_PLAN = 1e-4, 0.02
"""Assumed of planning until it was timed: for each pair of hints of a body, and for a plan of the judge."""
T = TypeVar("T")


class Scheduler:
    """Follows the program from hint to hint, and keeps its allowance.

        scheduler = Scheduler(rate=1 / 3600, overhead=0.03)
        if scheduler.due("line 12", seconds_since_last_checkpoint, measured_cost=None):
            ...                             # save
            scheduler.saved(seconds)        # what it has really cost

    Seconds of checkpoints and of planning are at most `overhead` × the program's own seconds at every moment,
    as far as costs were known: one that turns out dearer is made up for by those that follow.
    """

    def __init__(
        self,
        rate: float,
        overhead: float,
        cost: Cost = "exact",
        *,
        unmeasured: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
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
        """Seconds of checkpoints and of planning."""
        self.planning = 0.0
        """Of these, seconds of planning."""
        self._clock = clock
        self._costs = _Costs(quantity("cost of a checkpoint", unmeasured))
        self._recent = Recent()
        self._judge = Judge(self.rate, self.overhead, cost)
        self._loop: _Loop | None = None
        self._since = 0.0
        self._taken: tuple[Hashable, float] | None = None
        self._hints = self._checkpoints = 0
        self._plan_at, self._plan_again = _FIRST_PLAN, _FIRST_PLAN
        self._look_at, self._look_again = _FIRST_LOOK, _FIRST_LOOK
        self._took: dict[str, float] = {}
        self._saving: tuple[float, float] | None = None
        """Seconds that a plan needs, and `elapsed` when there was not enough left for it."""

    @property
    def allowed(self) -> float:
        """Seconds of checkpoints and of planning, up to now."""
        return self.overhead * self.elapsed

    @property
    def _left(self) -> float:
        """Of the allowance, for checkpoints."""
        left = self.allowed - self.spent
        if self._saving is None:
            return left
        needed, begun = self._saving
        return left - min(needed, _PLANNING * self.overhead * (self.elapsed - begun))

    @property
    def steady(self) -> bool:
        """Whether the program is in a loop whose best placement is known."""
        return self._loop is not None

    def due(self, place: Hashable, since: float, measured_cost: float | None = None) -> bool:
        """Whether to save at `place` now; if so, the checkpoint counts as paid, and `saved` is to be called.

        `since`: the program's seconds since the last checkpoint ended, or since the beginning.
        `measured_cost`: seconds that a checkpoint here takes, as far as whoever calls knows; else the median
        of what `saved` was told.
        """
        since = quantity("time since the last checkpoint", since)
        if measured_cost is not None:
            self._costs.tell(place, quantity("cost of a checkpoint", measured_cost))
        self._reached(place, since)
        cost = self._costs.of(place) if measured_cost is None else measured_cost
        if not self.rate or self._waits(since, cost):
            return False
        if (short := cost - self._left) > 0:
            if self._loop is not None:
                self._loop.found_short(min(short, cost))
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
        self._costs.measure(place, seconds)
        if self._loop is not None:
            self._loop.choose_way(self._left)

    def _reached(self, place: Hashable, since: float) -> None:
        step = since - self._since if since >= self._since else since
        self._since = since
        self.elapsed += step
        self._hints += 1
        self._recent.reached(place, step)
        if self._loop is not None and not self._loop.reached(place):
            self._loop, self._look_again = None, _FIRST_LOOK
            self._look_at = self._hints + _FIRST_LOOK
        if self._hints >= self._look_at and (self._loop is None or self._loop.is_round):
            self._look()

    def _look(self) -> None:
        """For a loop, or whether the one that there is has changed."""
        loop = self._loop
        self._look_again = min(2 * self._look_again, _LAST_LOOK)
        self._look_at = self._hints + self._look_again
        hints = self._recent.body() if loop is None else len(loop.places)
        if hints is None or hints > _MOST_HINTS or not self.rate:
            return
        body = self._body(hints)
        if loop is None or loop.iterations >= loop.solve_at or loop.body.moved(body):
            assumed = _SECONDS_OF_A_PAIR * hints**2
            solve = functools.partial(steady, body.times, body.costs, self.rate, body.overhead, self.cost)
            if (found := self._planned(f"a loop of {hints}", assumed, solve)) is not None:
                self._loop = _Loop(self._recent.places[-hints:], body, found, loop)

    def _body(self, hints: int) -> _Body:
        times, longer = self._recent.seconds(hints)
        costs = [self._costs.of(place) for place in self._recent.places[-hints:]]
        return _Body(times, costs, self.overhead * longer)

    def _planned(self, what: str, assumed: float, work: Callable[[], T]) -> T | None:
        """Do it, if there is enough left of the allowance, which else is saved up for it. What it takes is
        spent."""
        needed = self._took.get(what, assumed)
        if self.planning + needed > _PLANNING * self.allowed:
            return None
        if self.spent + needed > self.allowed:
            self._saving = (needed, self._saving[1] if self._saving else self.elapsed)
            return None
        self._saving = None
        begin = self._clock()
        found = work()
        self._took[what] = taken = self._clock() - begin
        self.planning += taken
        self.spent += taken
        return found

    def _waits(self, since: float, cost: float) -> bool:
        """Whether there is a better hint to come."""
        left = self._left
        if self._loop is not None:
            return left < self._loop.most + _FULL * cost and since < self._loop.least
        if left < cost:
            return True
        costs = [self._costs.of(place) for place in set(self._recent.places)]
        alike = max(costs) <= _ALIKE * min(costs)
        if alike and self._hints > _CLOSE * self._checkpoints:
            return False
        if self._hints >= self._plan_at:
            self._plan_at = self._hints + self._plan_again
            self._plan_again = min(2 * self._plan_again, _LAST_PLAN)
            plan = functools.partial(self._judge.plan, self._recent, self._costs.of)
            self._planned("the judge", _SECONDS_OF_A_PLAN, plan)
        return left < _FULL * cost and self._judge.waits(since, cost, self._recent, self._costs.of)


class _Costs:
    """Of checkpoints, at each place: the median of those that were taken, else what was told, else a
    guess."""

    def __init__(self, unmeasured: float) -> None:
        self._unmeasured = unmeasured
        self._measured: dict[Hashable, deque[float]] = {}
        self._told: dict[Hashable, float] = {}

    def tell(self, place: Hashable, seconds: float) -> None:
        if place in self._measured:
            self._measured[place].append(seconds)
        self._told[place] = seconds

    def measure(self, place: Hashable, seconds: float) -> None:
        self._measured.setdefault(place, deque(maxlen=_MEASUREMENTS)).append(seconds)

    def of(self, place: Hashable) -> float:
        if place in self._measured:
            return median(self._measured[place])
        known = {each: median(seconds) for each, seconds in self._measured.items()}
        if place not in self._told:
            return median(known.values()) if known else self._unmeasured
        wrong = [seconds / self._told[each] for each, seconds in known.items() if self._told.get(each)]
        return self._told[place] * (median(wrong) if wrong else 1.0)


class _Body:
    """What a loop's placement follows from."""

    def __init__(self, times: Sequence[float], costs: Sequence[float], overhead: float) -> None:
        self.times, self.costs, self.overhead = times, costs, overhead

    def moved(self, now: _Body) -> bool:
        """Whether it would follow from these by a tenth otherwise; times as parts of an iteration."""
        body = max(sum(self.times), sum(now.times))
        changed = [abs(a - b) > _MOVED * body for a, b in zip(self.times, now.times, strict=True)]
        pairs = [*zip(self.costs, now.costs, strict=True), (self.overhead, now.overhead)]
        changed += [abs(a - b) > _MOVED * max(a, b) for a, b in [*pairs, (sum(self.times), sum(now.times))]]
        return any(changed)


class _Loop:
    """Where the program is in a loop, and by which of the two ways of its placement it goes on."""

    def __init__(self, places: list[Hashable], body: _Body, found: Steady, before: _Loop | None) -> None:
        self.places, self.body, self._found = places, body, found
        self._at = len(places) - 1
        denser = before is not None and before.is_denser
        self._way = found.denser if denser else found.sparser
        self.most = max(found.reserve)
        """Seconds of checkpoints that are ever to be saved up."""
        self._margin = 0.0
        """Of allowance, that was missing where a checkpoint was due: times are never quite what they were."""
        self._taken = 0
        self.iterations: int = before.iterations if before else 0
        self.solve_at = 2 * max(self.iterations, 1)

    @property
    def is_denser(self) -> bool:
        return self._way is self._found.denser

    @property
    def least(self) -> float:
        """Seconds since the last checkpoint, from which on this hint is taken."""
        return self._way[self._at]

    @property
    def is_round(self) -> bool:
        return self._at == len(self.places) - 1

    def reached(self, place: Hashable) -> bool:
        """Whether it still goes round."""
        self._at += 1
        if self._at == len(self.places):
            self._at = 0
            self.iterations += 1
        return self.places[self._at] == place

    def choose_way(self, left: float) -> None:
        """Behind a checkpoint, with so many seconds of allowance left."""
        enough = left >= self._found.reserve[self._at] + self._margin
        self._way = self._found.denser if enough else self._found.sparser
        self._taken += 1

    def found_short(self, seconds: float) -> None:
        """A checkpoint was due, and so many seconds of allowance were missing."""
        if self._taken > 1:
            self._margin = max(self._margin, seconds)
