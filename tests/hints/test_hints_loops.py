"""Checkpoints in loops: solved as a period (paper 000 §5.3.2), and decided as the program runs."""

from __future__ import annotations

import functools
import itertools
import math
import random
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from understudy.hints.cost import Cost, expected_loss
from understudy.hints.placement import Periodic, place, place_periodic
from understudy.hints.scheduling import Scheduler

pytestmark = pytest.mark.drawn(3)


@dataclass(frozen=True)
class Body:
    """Of a loop, with hints that are unevenly spaced."""

    times: list[float]
    costs: list[float]
    rate: float
    overhead: float

    @classmethod
    def of(cls, hints: int, iterations_of_a_checkpoint: float, *, equal: bool, losing: float) -> Body:
        """`losing`: λ × the average block."""
        draw = random.Random(hints)
        times = [0.2 + draw.random() for _ in range(hints + 1)]
        costs = [0.1 if equal else 0.05 + 0.1 * draw.random() for _ in range(hints)]
        block = math.fsum(times) * iterations_of_a_checkpoint
        return cls(times, costs, losing / block, 1.0001 * math.fsum(costs) / hints / block)

    def unrolled(self, iterations: int) -> tuple[list[float], list[float]]:
        first, *inner, last = self.times
        times = [first, *([*inner, last + first] * iterations)][: len(self.costs) * iterations]
        return [*times, last], self.costs * iterations

    def periodic(self, iterations: int, cost: Cost = "exact") -> Periodic:
        return place_periodic(self.times, self.costs, self.rate, self.overhead, iterations, cost)


def carried_out(found: Periodic, body: Body, cost: Cost = "exact") -> tuple[float, float, int]:
    """What it loses, spends, and how many checkpoints it takes, iteration by iteration."""
    times, costs = body.unrolled(found.iterations)
    hints = len(body.costs)
    chosen = [index for index in range(len(costs)) if found.takes(*divmod(index, hints))]
    ends = [0.0, *itertools.accumulate(times)]
    cuts = [0, *(index + 1 for index in chosen), len(times)]
    loss = math.fsum(expected_loss(ends[b] - ends[a], body.rate, cost) for a, b in itertools.pairwise(cuts))
    return loss, math.fsum(costs[index] for index in chosen), len(chosen)


LOOPS = [(1, 12_500, 1.5), (3, 4_100, 0.4), (8, 1_550, 1.7)]


@pytest.mark.parametrize(("hints", "iterations", "apart"), LOOPS)
@pytest.mark.parametrize(("equal", "losing", "cost"), [(True, 0.01, "exact"), (False, 1.0, "paper")])
def test_a_period_loses_at_most_a_hundredth_more_than_the_unrolled_optimum(
    hints: int, iterations: int, apart: float, equal: bool, losing: float, cost: Cost
) -> None:
    body = Body.of(hints, apart, equal=equal, losing=losing)
    found = body.periodic(iterations, cost)
    loss, spent, count = carried_out(found, body, cost)
    assert [found.loss, found.spent, found.count] == pytest.approx([loss, spent, count])
    assert found.spent <= found.allowed
    optimum = place(*body.unrolled(iterations), body.rate, body.overhead, cost)
    assert found.loss <= 1.01 * optimum.bound


@pytest.mark.long
@pytest.mark.parametrize("apart", [0.3, 1.5, 3.3, 40.0, 1000.0])
@pytest.mark.parametrize(("hints", "iterations"), [(1, 100_000), (2, 50_000), (7, 14_000), (50, 2_000)])
@pytest.mark.parametrize(("equal", "losing"), [(True, 1.0), (False, 0.01)])
def test_a_period_loses_at_most_a_hundredth_more_than_the_optimum_of_a_hundred_thousand_places(
    hints: int, iterations: int, apart: float, equal: bool, losing: float
) -> None:
    body = Body.of(hints, apart, equal=equal, losing=losing)
    found = body.periodic(iterations)
    assert found.spent <= found.allowed
    assert found.loss == pytest.approx(carried_out(found, body)[0])
    assert found.loss <= 1.01 * place(*body.unrolled(iterations), body.rate, body.overhead).bound


@pytest.mark.parametrize("apart", [0.5, 1.5, 400.0, 1e6, 3e8])
@pytest.mark.parametrize("equal", [True, False])
def test_a_thousand_million_iterations_are_solved_at_once(apart: float, equal: bool) -> None:
    body = Body.of(3, apart, equal=equal, losing=0.5)
    begun = time.process_time()
    found = body.periodic(10**9)
    assert time.process_time() - begun < 5  # a tenth of that, mostly; unrolled, it would be an hour
    assert 0 < found.spent <= found.allowed
    even = expected_loss(math.fsum(body.times) * 1e9 / (found.count + 1), body.rate) * (found.count + 1)
    assert found.loss >= even * (1 - 1e-9)
    if apart > 100:
        assert found.loss <= even * 1.01


def test_a_loop_of_few_hints_is_solved_as_if_unrolled() -> None:
    body = Body.of(3, 2.5, equal=False, losing=1.0)
    found, unrolled = body.periodic(200), place(*body.unrolled(200), body.rate, body.overhead)
    assert found.repeats == 0
    assert found.allowed == pytest.approx(unrolled.allowed)
    assert found.loss == pytest.approx(unrolled.loss, rel=1e-3)


def test_a_loop_that_can_pay_all_its_hints_takes_them_in_each_iteration() -> None:
    found = place_periodic([1.0, 1.0, 1.0], [0.1, 0.2], 0.1, 0.2, 10**6)
    assert found.count == 2 * 10**6
    assert all(found.takes(iteration, hint) for iteration in (0, 1, 999_999) for hint in (0, 1))
    assert not found.takes(10**6, 0)


def test_free_hints_are_taken_though_others_are_too_dear() -> None:
    found = place_periodic([1.0, 1.0, 1.0], [0.0, 1e5], 0.1, 0.001, 10**6)
    assert found.count == pytest.approx(10**6, abs=100)
    assert found.spent <= found.allowed


@pytest.mark.parametrize(
    ("times", "costs", "rate", "overhead", "iterations"),
    [
        ([1.0], [], 0.1, 0.1, 10**9),
        ([1.0, 1.0], [0.1], 0.0, 0.1, 10**9),
        ([1.0, 1.0], [0.1], 0.1, 0.0, 10**9),
        ([1.0, 1.0], [0.1], 0.1, 0.1, 0),
        ([0.0, 0.0], [0.1], 0.1, 0.1, 10**9),
        ([1.0, 1.0], [1e200], 0.1, 0.1, 10**9),
    ],
    ids=["no hint", "no failures", "no allowance", "no iteration", "no time", "too dear"],
)
def test_loops_that_take_no_checkpoint(
    times: list[float], costs: list[float], rate: float, overhead: float, iterations: int
) -> None:
    found = place_periodic(times, costs, rate, overhead, iterations)
    assert (found.count, found.spent, found.takes(0, 0)) == (0, 0, False)


@pytest.mark.parametrize("iterations", [-1, 1.5, True, None, "3", 10**400])
def test_another_number_of_iterations_is_refused_in_one_sentence(iterations: Any) -> None:
    with pytest.raises(ValueError, match=r"^The number of iterations is .*; pass .*\.$"):
        place_periodic([1.0, 1.0], [0.1], 0.1, 0.1, iterations)


Untimed = functools.partial(Scheduler, clock=lambda: 0.0)
"""On whose clock planning takes no time, whatever else this machine does."""


@dataclass
class Run:
    """A program on a simulated clock, its checkpoints taken as a scheduler says."""

    scheduler: Scheduler
    known: bool = True
    """Whether costs are told before they are paid."""
    since: float = 0.0
    loss: float = 0.0
    taken: list[Any] = field(default_factory=list)

    def reach(self, place: str, seconds: float, cost: float) -> None:
        self.since += seconds
        if self.scheduler.due(place, self.since, cost if self.known else None):
            self.scheduler.saved(cost)
            self.loss += expected_loss(self.since, self.scheduler.rate)
            self.since = 0.0
            self.taken.append(place)
        if self.known:
            assert self.scheduler.spent <= self.scheduler.allowed

    def loop(self, body: Body, iterations: int, noise: random.Random | None = None) -> None:
        last = 0.0
        for _ in range(iterations):
            for hint, cost in enumerate(body.costs):
                seconds = body.times[hint] + (last if hint == 0 else 0)
                self.reach(f"hint {hint}", seconds * (noise.uniform(0.5, 1.5) if noise else 1), cost)
            last = body.times[-1]


@pytest.mark.parametrize(("hints", "apart"), [(1, 0.4), (1, 1.5), (1, 20.5), (3, 0.5), (3, 1.5), (5, 8.0)])
@pytest.mark.parametrize("equal", [True, False])
def test_a_steady_loop_loses_at_most_a_fiftieth_more_than_the_placement_that_knows_it(
    hints: int, apart: float, equal: bool
) -> None:
    body = Body.of(hints, apart, equal=equal, losing=0.3)
    run = Run(Untimed(body.rate, body.overhead))
    run.loop(body, 1000)
    assert run.loss + expected_loss(run.since, body.rate) <= 1.02 * body.periodic(1000).loss


def test_dear_hints_are_passed_over_where_cheap_ones_are_near() -> None:
    body = Body([5.0, 5.0, 1.0], [3.0, 0.3], 1e-3, 0.01)
    run = Run(Untimed(body.rate, body.overhead))
    run.loop(body, 2000)
    assert run.taken[50:].count("hint 0") < 0.02 * len(run.taken)
    assert run.loss <= 1.02 * body.periodic(2000).loss


def test_the_allowance_is_kept_at_every_moment_whatever_times_and_costs_do() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        run = Run(Untimed(10 ** draw.uniform(-6, 0), draw.choice([0, 0.01, 0.1, 1.0])))
        for _ in range(200):
            run.reach(
                draw.choice("abc"), draw.choice([0, draw.random(), 100 * draw.random()]), draw.random() ** 4
            )


def test_costs_that_nobody_knows_are_measured_and_what_was_too_much_is_made_up_for() -> None:
    body = Body.of(2, 6.0, equal=True, losing=0.3)
    run = Run(Untimed(body.rate, body.overhead, unmeasured=0.0), known=False)
    run.loop(body, 1, random.Random(1))
    assert run.scheduler.spent > run.scheduler.allowed  # the first one, at once
    run.loop(body, 1000, random.Random(2))
    assert 0.98 * run.scheduler.allowed <= run.scheduler.spent <= run.scheduler.allowed


@pytest.mark.parametrize("dearer", [0.1, 10.0])
def test_it_follows_costs_that_change(dearer: float) -> None:
    body = Body.of(2, 6.0, equal=True, losing=0.3)
    later = Body(body.times, [cost * dearer for cost in body.costs], body.rate, body.overhead)
    run = Run(Untimed(body.rate, body.overhead), known=False)
    run.loop(body, 600)
    before = len(run.taken)
    run.loop(later, 600)
    assert len(run.taken) - before == pytest.approx(min(before / dearer, 1200), rel=0.25)


def test_it_follows_times_that_change_and_forgets_which_hint_was_the_cheap_one() -> None:
    body = Body([5.0, 5.0, 1.0], [3.0, 0.3], 1e-3, 0.01)
    run = Run(Untimed(body.rate, body.overhead))
    run.loop(body, 1000)
    before = len(run.taken)
    run.loop(Body([10.0, 50.0, 1.0], [0.3, 3.0], body.rate, body.overhead), 1000)
    later = run.taken[before:]
    assert later[20:].count("hint 1") < 0.1 * len(later)
    assert run.scheduler.spent >= 0.95 * run.scheduler.allowed


def test_inner_and_outer_hints_of_nested_loops_are_told_apart() -> None:
    run = Run(Untimed(1e-3, 0.01))
    for _ in range(60):
        for _ in range(20):
            run.reach("inner", 1.0, 1.0)
        run.reach("outer", 0.5, 0.2)
    assert run.taken[5:].count("outer") > 0.9 * (len(run.taken) - 5)


def test_a_checkpoint_that_was_due_and_could_not_be_saved_makes_no_second_count_twice() -> None:
    scheduler = Scheduler(0.1, 1.0)
    assert scheduler.due("a", 10.0, 1.0)
    assert scheduler.due("a", 12.0, 1.0)  # still since the last one that there is
    scheduler.saved(1.0)
    assert scheduler.elapsed == 12.0
    scheduler.due("a", 5.0, 1.0)
    assert scheduler.elapsed == 17.0


def test_nothing_is_due_where_nothing_fails_or_nothing_is_allowed() -> None:
    for scheduler in (Scheduler(0.0, 0.5), Scheduler(1.0, 0.0)):
        assert not any(scheduler.due("a", float(second), 0.1) for second in range(1, 100))


def test_a_scheduler_refuses_bad_numbers_and_a_save_that_was_not_due() -> None:
    for arguments in ((-1.0, 0.1), (0.1, math.nan), (math.inf, 0.1), (0.1, 0.1, "cheap")):
        with pytest.raises(ValueError, match=r"\.$"):
            Scheduler(*arguments)
    scheduler = Scheduler(0.1, 0.1)
    for arguments in ((math.nan, 0.1), (-1.0, 0.1), (1.0, -0.1), (1.0, math.inf)):
        with pytest.raises(ValueError, match="pass a finite number from 0 on"):
            scheduler.due("a", *arguments)
    assert scheduler.elapsed == 0
    with pytest.raises(ValueError, match="No checkpoint was due"):
        scheduler.saved(1.0)
