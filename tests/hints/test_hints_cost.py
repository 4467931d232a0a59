"""What a block between two checkpoints loses, on average (paper 000 §2.1)."""

from __future__ import annotations

import decimal
import itertools
import math
import random
from typing import Any

import pytest

from understudy.hints.cost import Cost, curve_of, expected_loss

COSTS: tuple[Cost, ...] = ("exact", "paper")
TIMES = (1e-9, 1e-3, 0.4, 1.0, 59.0, 3600.0, 1e6)
RATES = (1e-30, 1e-9, 1e-4, 1 / 3600, 0.04999, 0.05001, 0.3, 2.0)


def in_many_digits(t: float, rate: float, cost: Cost) -> decimal.Decimal:
    """As the formulas are written."""
    with decimal.localcontext(prec=700):
        seconds, failures = decimal.Decimal(t), decimal.Decimal(rate)
        grown = (seconds * failures).exp()
        if cost == "exact":
            return (grown - 1) / failures - seconds
        p = 1 - 1 / grown
        return seconds / 2 * p / (1 - p)


@pytest.mark.parametrize("cost", COSTS)
def test_losses_are_those_of_the_formulas_to_thirteen_digits_from_the_smallest_to_the_largest(
    cost: Cost,
) -> None:
    for t, rate in itertools.product(TIMES, RATES):
        if t * rate < 690:
            assert expected_loss(t, rate, cost) == pytest.approx(
                float(in_many_digits(t, rate, cost)), rel=2e-13
            )


def test_the_exact_loss_is_what_simulated_failures_cost() -> None:
    draw, t, rate = random.Random(23), 2.0, 0.7
    losses = []
    for _ in range(20_000):
        lost = 0.0
        while (failed_after := draw.expovariate(rate)) < t:
            lost += failed_after
        losses.append(lost)
    mean = math.fsum(losses) / len(losses)
    error = math.sqrt(math.fsum((lost - mean) ** 2 for lost in losses)) / len(losses)
    assert abs(mean - expected_loss(t, rate)) < 5 * error
    assert abs(mean - expected_loss(t, rate, "paper")) > 5 * error  # an approximation, as the paper has it


@pytest.mark.parametrize("rate", [1e-12, 1e-3, 3.0])
def test_both_losses_agree_where_failures_are_rare_and_the_papers_is_the_larger_one(rate: float) -> None:
    exact, paper = expected_loss(2.0, rate), expected_loss(2.0, rate, "paper")
    assert exact <= paper <= exact * (1 + 2 * rate * math.exp(2 * rate))


@pytest.mark.parametrize("cost", COSTS)
def test_cutting_a_block_never_costs_and_longer_blocks_and_higher_rates_never_lose_less(cost: Cost) -> None:
    draw = random.Random(24)
    for _ in range(2_000):
        a, b, rate = (10 ** draw.uniform(-9, 2) for _ in range(3))
        whole = expected_loss(a + b, rate, cost)
        assert expected_loss(a, rate, cost) + expected_loss(b, rate, cost) <= whole * (1 + 1e-12)
        assert expected_loss(a, rate, cost) <= whole <= expected_loss(a + b, rate * 2, cost)


@pytest.mark.parametrize("cost", COSTS)
def test_nothing_is_lost_without_time_or_without_failures(cost: Cost) -> None:
    assert expected_loss(0, 5.0, cost) == 0 == expected_loss(5.0, 0, cost)


@pytest.mark.parametrize("cost", COSTS)
def test_a_loss_too_large_for_a_float_is_infinite_and_no_error(cost: Cost) -> None:
    assert expected_loss(1e6, 1.0, cost) == math.inf
    assert expected_loss(1e308, 1e308, cost) == math.inf


@pytest.mark.parametrize("cost", COSTS)
def test_a_loss_that_is_a_float_is_found_though_its_exponential_is_none(cost: Cost) -> None:
    t, rate = 7.15e-8, 1e10
    assert math.isclose(expected_loss(t, rate, cost), float(in_many_digits(t, rate, cost)), rel_tol=1e-11)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, -math.inf, None, "3", 10**400, [1.0]], ids=str)
def test_what_is_no_finite_number_from_nought_on_is_refused_in_one_sentence(value: Any) -> None:
    for arguments in ((value, 1.0), (1.0, value)):
        with pytest.raises(ValueError, match=r"^The (time of a block|failure rate) is .*; pass [^.]*\.$"):
            expected_loss(*arguments)


def test_a_cost_that_there_is_not_is_refused_whatever_the_block() -> None:
    with pytest.raises(ValueError, match="There is no cost 'cheap'; take 'exact' or 'paper'"):
        expected_loss(0, 0, "cheap")  # type: ignore[arg-type]


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("d", [1e-25, 1e-9, 1e-3, 0.049, 0.051, 1.0, 30.0, 300.0])
def test_a_later_beginning_overtakes_where_it_has_made_up_for_its_debt(cost: Cost, d: float) -> None:
    curve = curve_of(cost)
    for u in (0.0, 1e-12, 1e-4, 0.3, 8.0, 200.0):
        u *= min(d * 1e3, 1.0)
        debt = curve.loss(u + d) - curve.loss(u)
        if u < 1e-3 * d or debt == math.inf:
            continue  # the difference says nothing about u
        assert curve.overtaking(d, debt) == pytest.approx(u, rel=1e-6)


@pytest.mark.parametrize("cost", COSTS)
def test_a_later_beginning_that_is_no_dearer_is_the_better_one_at_once(cost: Cost) -> None:
    curve = curve_of(cost)
    assert [curve.overtaking(d, debt) for d, debt in ((1.0, -5.0), (1.0, 0.0), (2.0, 0.1), (900.0, 1e9))] == [
        0
    ] * 4
