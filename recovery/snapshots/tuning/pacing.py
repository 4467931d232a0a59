"""`proxyd --persist-every auto`: after how many steps a snapshot goes to storage, from what is observed.

Pure: looks at a training go in, an interval comes out.  The first choice is cautious; the adapter follows.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

from understudy.recovery.snapshots.tuning.adapter import MOST_LOST, Adapter, Observation
from understudy.recovery.snapshots.tuning.tuner import SMALLEST_CHUNK, Limits, Measured, size, write_time

LEAST_STEPS, LEAST_S = 3, 1.0
"""Without writing, before the time of a step counts as known: a look may be a step or 0.05 s off."""
SHORTEST_S = 0.25
"""From one set to the next: proxyd leases a set when it sees it, and two newer ones may end it before."""
CAUTIOUS_SLOWDOWN = 1 / (1 - MOST_LOST / 2)
"""Of steps while the first snapshots are written, before that was observed; makes the interval long."""


@dataclass
class Spent:
    """Time and steps of one kind."""

    seconds: float = 0.0
    steps: int = 0

    @property
    def suffices(self) -> bool:
        """To know the time of a step by."""
        return self.steps >= LEAST_STEPS and self.seconds >= LEAST_S


class Meter:
    """Divides the time of a training into steps during which something was written, and others."""

    def __init__(self) -> None:
        self.quiet, self.writing = Spent(), Spent()
        self._since: tuple[float, int] | None = None
        self._touched = False
        self._epoch: Hashable = None

    def look(self, at_s: float, step: int, under_way: bool, epoch: Hashable) -> None:
        """One look; `step` is that of the slowest rank.  A look of another `epoch` is no continuation."""
        if self._since is None or epoch != self._epoch or step < self._since[1]:
            self._since, self._touched, self._epoch = (at_s, step), under_way, epoch
            return
        self._touched |= under_way
        if step > self._since[1]:
            spent = self.writing if self._touched else self.quiet
            spent.seconds += at_s - self._since[0]
            spent.steps += step - self._since[1]
            self._since, self._touched = (at_s, step), under_way

    def take(self) -> tuple[Spent, Spent]:
        """What has come together since the last time: quiet, if it suffices by now, and writing."""
        taken = self.quiet, self.writing
        if self.quiet.suffices:
            self.quiet = Spent()
        self.writing = Spent()
        return taken


class Pacing:
    """Paces one run.  `overhead` [q] is a factor on training time; `most` [N] sets may be under way at once.

    Three trials, then a first choice: the set that makes the stores; one alone; `most` at once, if one takes
    longer than a step.
    """

    def __init__(self, overhead: float, most: int) -> None:
        self._overhead, self._most = overhead, most
        self._meter = Meter()
        self._step_s: float | None = None
        """Of quiet steps, the last time that there were enough of them."""
        self._stores_made = False
        self._trial, self._begun = 1, 0
        """How many sets are to be under way at once, and how many of them were begun."""
        self._tried: dict[int, float] = {}
        self._adapter: Adapter | None = None

    @property
    def interval(self) -> int:
        """Steps from one set to the next; 0 while nothing is chosen yet."""
        if self._adapter is None:
            return 0
        return max(self._adapter.choice.interval, math.ceil(SHORTEST_S / self._adapter.measured_now.step_s))

    @property
    def in_flight(self) -> int:
        """Sets that may be under way at once."""
        return self._adapter.choice.in_flight if self._adapter is not None else self._most

    def look(self, at_s: float, step: int, under_way: bool, epoch: Hashable) -> None:
        """See `Meter.look`."""
        self._meter.look(at_s, step, under_way, epoch)
        if self._meter.quiet.suffices:
            self._step_s = self._meter.quiet.seconds / self._meter.quiet.steps

    def next_step(self, after: int, under_way: int) -> int | None:
        """The first step behind `after` whose set is to be persisted, if `under_way` sets are now."""
        if self.interval:
            return (after // self.interval + 1) * self.interval
        if under_way == 0:
            self._begun = 0  # whatever became of the last ones
        return after + 1 if self._step_s is not None and self._begun < self._trial else None

    def begun(self) -> None:
        """A set was ordered."""
        self._begun += 1

    def durable(self, at_s: float, taken_s: float, in_flight: int, written: int, left: int) -> None:
        """A set of `written` bytes became durable; `in_flight` were under way at most, `left` still are."""
        if not self._stores_made or self._step_s is None or taken_s <= 0 or written <= 0:
            self._stores_made = True
            self._meter.take()
        elif self._adapter is not None:
            self._adapter = self._adapter.observed(self._seen(at_s, taken_s, in_flight, written))
        else:
            self._tried[in_flight] = max(taken_s, self._tried.get(in_flight, 0))
            if self._trial < self._most and taken_s > self._step_s:
                self._trial = self._most
            elif not left:
                self._adapter = self._first(written, self._step_s)

    def _seen(self, at_s: float, taken_s: float, in_flight: int, written: int) -> Observation:
        assert self._step_s is not None
        quiet, writing = self._meter.take()
        return Observation(
            at_s,
            step_s=self._step_s if quiet.suffices else None,
            write_s=taken_s,
            in_flight=in_flight,
            storage_bytes_s=written * in_flight / taken_s,
            lost=(writing.seconds - writing.steps * self._step_s) / taken_s if writing.steps else None,
        )

    def _first(self, written: int, step_s: float) -> Adapter:
        self._meter.take()
        storage_bytes_s = max(count * written / taken_s for count, taken_s in self._tried.items())
        measured = Measured(
            step_s=step_s,
            state_bytes=written,
            device_to_host_bytes_s=storage_bytes_s,  # only chunks depend on it, which are not ours to choose
            write_time_s=self._tried,
            storage_bytes_s=storage_bytes_s,
            slowdown_while_persisting=CAUTIOUS_SLOWDOWN,
        )
        room = (self._most + 1) * written
        return Adapter.begin(measured, Limits(max(written, SMALLEST_CHUNK), room, self._overhead))

    def told(self) -> str:
        """The choice, and why, in one line; empty while nothing is chosen."""
        if self._adapter is None:
            return ""
        now, choice = self._adapter.measured_now, self._adapter.choice
        return (
            f"every {self.interval} steps (about {self.interval * now.step_s:.3g} s), "
            f"{choice.in_flight} at a time: "
            f"{size(now.state_bytes)} take {write_time(now, choice.in_flight):.3g} s to write, "
            f"which makes steps of {now.step_s:.3g} s {now.slowdown_while_persisting:.3g} times as long; "
            f"{100 * (self._overhead - 1):.3g} % is allowed"
        )
