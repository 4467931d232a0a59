"""Which places become checkpoints (paper 000 §2): against brute force, the plain recurrence, and bounds."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from understudy.hints import knapsack, placement
from understudy.hints.cost import Cost, expected_loss
from understudy.hints.placement import Placement, place

pytestmark = pytest.mark.drawn(3)

COSTS: tuple[Cost, ...] = ("exact", "paper")
LAYERS, PRICES = 10**12, 0
"""Of evaluations: what makes `place` solve equal costs layer by layer, and by prices."""


def loss_of(chosen: Sequence[int], times: Sequence[float], rate: float, cost: Cost) -> float:
    cuts = [0, *(index + 1 for index in chosen), len(times)]
    return math.fsum(expected_loss(math.fsum(times[a:b]), rate, cost) for a, b in itertools.pairwise(cuts))


def all_placements(times: Sequence[float], costs: Sequence[float], overhead: float) -> list[tuple[int, ...]]:
    allowed = overhead * math.fsum(times)
    places = range(len(costs))
    every = itertools.chain.from_iterable(itertools.combinations(places, k) for k in range(len(costs) + 1))
    return [chosen for chosen in every if math.fsum(costs[index] for index in chosen) <= allowed]


def recurrence(times: Sequence[float], count: int, rate: float, cost: Cost) -> float:
    """The paper's, as it is written: O(n²) for each checkpoint (§2.2)."""
    ends = torch.tensor([0.0, *itertools.accumulate(times)], dtype=torch.float64)
    t = (ends[None, :] - ends[:, None]).clamp(min=0)
    block = t / 2 * torch.expm1(rate * t) if cost == "paper" else torch.expm1(rate * t) / rate - t
    block[torch.ones_like(block, dtype=torch.bool).tril()] = math.inf
    best = block[0]
    for _ in range(count):
        best = (best[:, None] + block).min(dim=0).values
    return float(best[-1])


def holds(found: Placement, times: Sequence[float], costs: Sequence[float], rate: float, cost: Cost) -> None:
    """What is true of every placement."""
    assert list(found.chosen) == sorted(set(found.chosen))
    assert found.spent == math.fsum(costs[index] for index in found.chosen) <= found.allowed
    assert found.loss == pytest.approx(loss_of(found.chosen, times, rate, cost), rel=1e-12)
    assert found.bound <= found.loss
    assert 0 <= found.gap <= 1


def instance(draw: random.Random, equal: bool) -> tuple[list[float], list[float], float, float]:
    n = draw.randint(0, 9)
    kind: Any = draw.choice(
        [lambda: 1.0, lambda: draw.choice([0, 1, 2]), draw.random, lambda: draw.paretovariate(0.7)]
    )
    times = [float(kind()) for _ in range(n + 1)]
    dear = draw.choice([0.5, 1.0, draw.random()])
    costs = [dear if equal else draw.choice([0, 0.1, draw.random(), 3 * draw.random()]) for _ in range(n)]
    return (
        times,
        costs,
        draw.choice([1e-40, 1e-9, 1e-3, 0.05, 1, 30]),
        draw.choice([0.01, 0.05, 0.1, 0.3, 0.7]),
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("way", [LAYERS, PRICES], ids=["layers", "prices"])
@pytest.mark.parametrize("cost", COSTS)
def test_with_equal_costs_it_is_the_best_of_all_placements(
    seed: int, way: int, cost: Cost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_FEW_EVALUATIONS", way)
    draw = random.Random(seed)
    for _ in range(12):
        times, costs, rate, overhead = instance(draw, equal=True)
        found = place(times, costs, rate, overhead, cost)
        least = min(loss_of(chosen, times, rate, cost) for chosen in all_placements(times, costs, overhead))
        holds(found, times, costs, rate, cost)
        assert found.loss == pytest.approx(least, rel=1e-9), (times, costs, rate, overhead)
        assert found.gap == 0 or least > 1e250  # where hardly anything is a float


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("gap", ["closed", "bounded by number", "left open"])
def test_with_unequal_costs_the_bound_the_best_placement_and_the_found_one_are_in_this_order(
    seed: int, cost: Cost, gap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gap == "bounded by number":
        monkeypatch.setattr(knapsack, "_MOST_PLACES", -1)
    if gap == "left open":
        monkeypatch.setattr(placement, "closed", lambda line, allowed, found: found)
    draw = random.Random(seed)
    for _ in range(12):
        times, costs, rate, overhead = instance(draw, equal=False)
        found = place(times, costs, rate, overhead, cost)
        least = min(loss_of(chosen, times, rate, cost) for chosen in all_placements(times, costs, overhead))
        holds(found, times, costs, rate, cost)
        assert found.bound <= least * (1 + 1e-9), (times, costs, rate, overhead)
        assert least <= found.loss * (1 + 1e-12), (times, costs, rate, overhead)
        if gap == "closed" and least < 1e250:
            assert found.loss == pytest.approx(least, rel=1e-9), (times, costs, rate, overhead)


@pytest.mark.parametrize("equal", [True, False])
def test_twelve_places_are_solved_as_by_brute_force(equal: bool) -> None:
    draw = random.Random(12)
    times = [draw.random() for _ in range(13)]
    costs = [1.0 if equal else draw.random() for _ in range(12)]
    found = place(times, costs, 0.1, 0.35)
    least = min(loss_of(chosen, times, 0.1, "exact") for chosen in all_placements(times, costs, 0.35))
    assert found.loss == pytest.approx(least, rel=1e-12)
    assert 0 < len(found.chosen) < 12


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("way", [LAYERS, PRICES], ids=["layers", "prices"])
@pytest.mark.parametrize(("n", "count"), [(60, 1), (400, 60), (2000, 5)])
def test_it_loses_what_the_plain_recurrence_loses(
    n: int, count: int, way: int, cost: Cost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_FEW_EVALUATIONS", way)
    draw = random.Random(n + count)
    for heavy in (False, True):
        times = [draw.paretovariate(1.3) if heavy else draw.random() for _ in range(n + 1)]
        rate = 3 / math.fsum(times)
        found = place(times, [1.0] * n, rate, (count + 0.5) / math.fsum(times), cost)
        assert len(found.chosen) == count
        assert found.loss == pytest.approx(recurrence(times, count, rate, cost), rel=1e-9)
        assert found.gap == 0


@pytest.mark.parametrize("count", [1, 1999, 3333, 19_999])
def test_equal_blocks_are_as_even_as_they_can_be(count: int) -> None:
    n, rate = 20_000, 1 / 3600
    found = place([1.0] * (n + 1), [1.0] * n, rate, (count + 0.5) / (n + 1))
    short, longer = divmod(n + 1, count + 1)
    even = longer * expected_loss(short + 1, rate) + (count + 1 - longer) * expected_loss(short, rate)
    assert len(found.chosen) == count
    assert found.loss == pytest.approx(even, rel=1e-11)


def solve_random(n: int, count: int, cost: Cost) -> Placement:
    draw = random.Random(count)
    times = [2 * draw.random() for _ in range(n + 1)]
    found = place(times, [1.0] * n, 1 / 3600, (count + 0.5) / math.fsum(times), cost)
    assert (len(found.chosen), found.gap) == (count, 0)
    return found


@pytest.mark.parametrize("count", [1, 2_000, 10_000])
def test_twenty_thousand_places_are_solved_with_any_number_of_checkpoints(count: int) -> None:
    solve_random(20_000, count, "exact")


@pytest.mark.long
@pytest.mark.timeout(60)
@pytest.mark.parametrize("cost", COSTS)
def test_a_hundred_thousand_places_are_solved_with_any_number_of_checkpoints_in_a_minute(cost: Cost) -> None:
    for count in (1, 100, 10_000, 50_000):
        solve_random(100_000, count, cost)


def test_many_places_of_unequal_costs_are_solved_to_a_thousandth() -> None:
    draw, n = random.Random(5), 3_000
    times, costs = [draw.random() for _ in range(n + 1)], [0.1 + draw.random() for _ in range(n)]
    found = place(times, costs, 1 / 3600, 0.1)
    holds(found, times, costs, 1 / 3600, "exact")
    assert 0 <= found.gap < 1e-3
    assert found.spent > 0.999 * found.allowed


def test_the_gap_of_a_few_checkpoints_among_many_places_is_small() -> None:
    """A price alone bounds the loss of three checkpoints to a seventh of it."""
    draw, n = random.Random(6), 3_000
    times, costs = [draw.random() for _ in range(n + 1)], [0.5 + draw.random() for _ in range(n)]
    found = place(times, costs, 1e-6, 1.95 / math.fsum(times))
    holds(found, times, costs, 1e-6, "exact")
    assert len(found.chosen) == 3
    assert found.gap < 1e-3


@pytest.mark.parametrize(("batches_of_a_checkpoint", "count"), [(1.0, 25), (0.9, 27), (26.0, 0)])
def test_the_papers_loop_gets_no_more_checkpoints_than_its_allowance_pays(
    batches_of_a_checkpoint: float, count: int
) -> None:
    """Figure 2: 5 epochs of 50 batches, a hint behind each batch and each epoch, allowance 0.1.

    The paper rounds up, and so would take 28 of those that last as long as 0.9 batches, and 1 of the last.
    """
    times = ([1.0] * 50 + [0.0]) * 5 + [0.0]
    found = place(times, [batches_of_a_checkpoint] * 255, 1 / 3600, 0.1, "paper")
    assert len(found.chosen) == count
    blocks = [len(found.chosen) + 1 - 250 % (count + 1), 250 % (count + 1)]
    even = 250 // (count + 1)
    assert found.loss == pytest.approx(
        blocks[0] * expected_loss(even, 1 / 3600, "paper")
        + blocks[1] * expected_loss(even + 1, 1 / 3600, "paper")
    )


@pytest.mark.parametrize("equal", [True, False])
def test_more_allowance_never_loses_more_and_more_failures_never_lose_less(equal: bool) -> None:
    draw, n = random.Random(77), 60
    times = [draw.random() for _ in range(n + 1)]
    costs = [0.2 if equal else 0.4 * draw.random() for _ in range(n)]
    by_allowance = [place(times, costs, 0.2, 0.01 * step).loss for step in range(41)]
    assert by_allowance == sorted(by_allowance, reverse=True)
    by_rate = [place(times, costs, rate, 0.1).loss for rate in (0, 1e-9, 1e-3, 0.1, 1, 10, 100, 1e6)]
    assert by_rate == sorted(by_rate)


@pytest.mark.parametrize(
    ("times", "costs", "rate", "overhead", "chosen"),
    [
        ([5.0], [], 0.1, 0.5, ()),
        ([0.0], [], 0.1, 0.5, ()),
        ([1.0, 1.0], [0.1], 0.0, 0.5, ()),
        ([1.0, 1.0], [0.1], 0.1, 0.0, ()),
        ([1.0, 1.0], [0.0], 0.1, 0.0, (0,)),
        ([0.0, 0.0, 0.0], [0.0, 0.0], 0.1, 0.5, ()),
        ([0.0, 5.0, 0.0, 5.0, 0.0], [0.1, 0.4, 0.2, 0.1], 0.1, 1.0, (2,)),
        ([1.0, 1.0, 1.0], [math.ulp(0), 1.0], 0.1, 1e-300, (0,)),
        ([1.0] * 4, [9.0, 0.3, 9.0], 0.1, 0.1, (1,)),
    ],
    ids=[
        "no place", "no time", "no failures", "no allowance", "free", "free, at once",
        "at once, the cheapest", "next to nothing", "dear ones",
    ],
)  # fmt: skip
def test_of_what_is_next_to_nothing(
    times: list[float], costs: list[float], rate: float, overhead: float, chosen: tuple[int, ...]
) -> None:
    found = place(times, costs, rate, overhead)
    assert (found.chosen, found.gap) == (chosen, 0)
    holds(found, times, costs, rate, "exact")


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("rate", [0.66, 0.7, 1.0, 1e6, 1e300])
@pytest.mark.parametrize("equal", [True, False])
def test_blocks_too_long_for_a_float_are_made_as_even_as_others(rate: float, equal: bool, cost: Cost) -> None:
    times, costs = [1000.0] * 9, [1.0 if equal else 1 + index / 100 for index in range(8)]
    found = place(times, costs, rate, 2.1 / 9000, cost)
    assert found.chosen == (2, 5)
    assert found.loss == found.bound == math.inf
    assert found.gap == 0


@pytest.mark.parametrize("way", [LAYERS, PRICES], ids=["layers", "prices"])
def test_the_longest_block_is_the_shortest_possible_where_nothing_else_counts(
    way: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_FEW_EVALUATIONS", way)
    draw = random.Random(8)
    for _ in range(20):
        times = [1e4 * draw.random() for _ in range(10)]
        costs = [1.0] * 9
        found = place(times, costs, 1.0, 3.5 / math.fsum(times))
        longest = [
            max(math.fsum(times[a:b]) for a, b in itertools.pairwise([0, *(i + 1 for i in chosen), 10]))
            for chosen in [*itertools.combinations(range(9), 3), found.chosen]
        ]
        assert longest[-1] <= min(longest) * 1.01


def test_tiny_rates_and_times_are_placed_as_others_are() -> None:
    times, costs = [3.0, 1.0, 1.5, 1.0, 1.0, 5.0], [0.5] * 5
    usual = place(times, costs, 1e-6, 0.09).chosen
    assert usual == place(times, costs, 1e-200, 0.09).chosen
    assert usual == place([t * 1e-150 for t in times], [c * 1e-150 for c in costs], 1e-150, 0.09).chosen
    assert usual == place([t * 1e150 for t in times], [c * 1e150 for c in costs], 1e-300, 0.09).chosen


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, None, "1"], ids=str)
def test_bad_numbers_are_refused_in_one_sentence_that_names_them(value: Any) -> None:
    good: dict[str, Any] = {"times": [1.0, 1.0], "costs": [0.1], "rate": 0.1, "overhead": 0.1}
    for name, bad, said in (
        ("times", [1.0, value], "time 1"),
        ("costs", [value], "cost of place 0"),
        ("rate", value, "failure rate"),
        ("overhead", value, "overhead"),
    ):
        with pytest.raises(ValueError, match=rf"^The {said} is .*; pass [^.]*\.$"):
            place(**good | {name: bad})


def test_what_does_not_fit_together_is_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="There are 1 times for 1 places; pass one more"):
        place([1.0], [0.1], 0.1, 0.1)
    with pytest.raises(ValueError, match="too long to be added up"):
        place([1.7e308, 1.7e308], [0.1], 0.1, 0.1)
    with pytest.raises(ValueError, match="There is no cost 'cheap'"):
        place([1.0, 1.0], [0.1], 0.1, 0.1, "cheap")  # type: ignore[arg-type]
