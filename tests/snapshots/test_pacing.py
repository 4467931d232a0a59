"""`--persist-every auto`: made-up trainings and storages, and the interval that comes of watching them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest

from understudy.recovery.snapshots.tuning.adapter import HOLD_S
from understudy.recovery.snapshots.tuning.pacing import LEAST_STEPS, Meter, Pacing, Spent

pytestmark = pytest.mark.drawn(8)

LOOK_S = 0.05
BYTES = 100 << 20


@dataclass
class Training:
    """Steps of `step_s` that take `slowdown` times as long while a set is written, which takes `write_s`."""

    pacing: Pacing
    step_s: float
    write_s: float
    slowdown: float
    noise: float = 0.0
    chance: random.Random = field(default_factory=lambda: random.Random(1))
    now: float = 0.0
    done: float = 0.0
    writing: dict[int, tuple[float, float, int]] = field(default_factory=dict)
    """Step -> begin, work left, most under way."""
    ordered: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)

    def go(self, seconds: float) -> float:
        """Train on; how many times as long as without snapshots that took."""
        begun_s, before = self.now, self.done
        while self.now - begun_s < seconds:
            self.look()
        return (self.now - begun_s) / ((self.done - before) * self.step_s)

    def look(self) -> None:
        factor = self.slowdown if self.writing else 1.0
        self.now += LOOK_S
        self.done += LOOK_S / (self.step_s * factor * (1 + self.noise * self.chance.uniform(-1, 1)))
        for step, (begun_s, left, most) in list(self.writing.items()):
            left -= LOOK_S / len(self.writing)
            self.writing[step] = begun_s, left, most
            if left <= 0:
                del self.writing[step]
                self.pacing.durable(self.now, self.now - begun_s, most, BYTES, len(self.writing))
                self.taken.append(step)
        while self.ordered and self.done >= self.ordered[0]:
            step = self.ordered.pop(0)
            if len(self.writing) < self.pacing.in_flight:
                most = len(self.writing) + 1
                self.writing[step] = self.now, self.write_s, most
                self.writing = {at: (b, left, max(m, most)) for at, (b, left, m) in self.writing.items()}
        step = int(self.done) + 1
        under_way = len(self.writing) + len(self.ordered)
        self.pacing.look(self.now, step, bool(self.writing), 0)
        ahead = step + math.ceil(LOOK_S / self.step_s)
        wanted = self.pacing.next_step(max([ahead, *self.ordered]), under_way)
        if wanted is not None and wanted <= ahead + 8:
            self.ordered.append(wanted)
            self.pacing.begun()


def test_a_step_counts_as_writing_if_anything_was_written_during_any_part_of_it() -> None:
    meter = Meter()
    for at_s, step, under_way in ((0, 1, False), (1, 1, False), (2, 2, False), (3, 2, True), (4, 2, False),
                                  (5, 4, False), (6, 5, False)):  # fmt: skip
        meter.look(at_s, step, under_way, "a")
    assert meter.take() == (Spent(3, 2), Spent(3, 2))
    assert meter.take() == (Spent(3, 2), Spent(0, 0))  # two quiet steps do not suffice
    meter.look(7, 6, False, "a")
    assert meter.take() == (Spent(4, 3), Spent(0, 0))
    assert meter.take() == (Spent(0, 0), Spent(0, 0))


def test_time_in_which_the_ranks_were_put_back_counts_as_nothing() -> None:
    meter = Meter()
    meter.look(0, 1, False, "a")
    meter.look(1, 2, False, "a")
    meter.look(100, 3, True, "b")  # another generation
    meter.look(101, 2, False, "b")  # fewer steps
    meter.look(102, 3, False, "b")
    assert meter.take() == (Spent(2, 2), Spent(0, 0))


def test_nothing_is_ordered_before_the_time_of_a_step_is_known() -> None:
    pacing = Pacing(1.03, 1)
    for step in range(1, LEAST_STEPS + 1):
        pacing.look(step, step, False, 0)
        assert pacing.next_step(step, 0) is None
    pacing.look(LEAST_STEPS + 1, LEAST_STEPS + 1, False, 0)
    assert pacing.next_step(LEAST_STEPS + 1, 0) == LEAST_STEPS + 2


def test_the_first_choice_is_cautious_and_the_set_that_makes_the_stores_does_not_count() -> None:
    pacing = Pacing(1.03, 1)
    for step in range(1, 13):
        pacing.look(step * 0.1, step, False, 0)
    pacing.durable(5.0, taken_s=4.0, in_flight=1, written=BYTES, left=0)
    assert pacing.interval == 0 and pacing.told() == ""
    pacing.look(6.0, 13, True, 0)
    pacing.durable(7.0, taken_s=1.0, in_flight=1, written=BYTES, left=0)
    # 45 % of a second is taken to be lost, and 3 % of the time may be: every 15 s, and steps take 0.1 s.
    assert 149 <= pacing.interval <= 151


@pytest.mark.parametrize("overhead", [1.03, 1.1, 1.3])
@pytest.mark.parametrize(
    ("step_s", "write_s", "slowdown"),
    [(0.02, 0.5, 1.5), (0.3, 2.0, 1.2), (0.3, 0.2, 1.3), (2.0, 0.7, 2.0), (1.0, 5.0, 1.0), (0.1, 3.0, 4.0)],
)
def test_training_takes_no_longer_than_is_allowed_once_it_has_been_watched(
    step_s: float, write_s: float, slowdown: float, overhead: float
) -> None:
    training = Training(Pacing(overhead, 2), step_s, write_s, slowdown)
    training.go(40 * (step_s + write_s) / (overhead - 1) + 60)
    count = len(training.taken)
    seconds = 20 * training.pacing.interval * step_s * overhead
    measured = training.go(seconds)
    assert 1 <= measured <= overhead + 0.35 * (overhead - 1) + 0.005, training.pacing.told()
    assert len(training.taken) - count >= 15  # it does take them


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_interval_grows_with_slow_storage_and_shrinks_again(noise: float) -> None:
    training = Training(Pacing(1.1, 1), 0.05, 0.5, 1.5, noise)
    training.go(120)
    quick = training.pacing.interval
    training.write_s = 5.0
    training.go(2 * HOLD_S + 12 * 5.0 * 1.1 / 0.1)
    slow = training.pacing.interval
    assert 6 * quick < slow < 15 * quick, training.pacing.told()
    training.write_s = 0.5
    training.go(2 * HOLD_S + 10 * slow * 0.05)
    assert quick / 1.5 < training.pacing.interval < quick * 1.5, training.pacing.told()


def test_a_choice_is_told_in_one_line_with_what_it_rests_on() -> None:
    training = Training(Pacing(1.1, 1), 0.05, 0.5, 1.5)
    training.go(120)
    told = training.pacing.told()
    assert told.startswith(f"every {training.pacing.interval} steps (about ") and "\n" not in told
    for part in ("1 at a time", "105 MB take", "steps of 0.05 s", "10 % is allowed"):
        assert part in told
