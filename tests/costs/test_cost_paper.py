"""What paper 001 prints follows from its equations, but for what is named here."""

from __future__ import annotations

import math

import pytest

from understudy.recovery.costs.given import paper
from understudy.recovery.costs.models.formulas import (
    least_periodic_waste,
    least_periodic_work,
    marginal_work,
    monthly_dollars_of_redone_work,
    optimal_frequency,
    periodic_waste,
    periodic_work,
    transparent_waste,
    transparent_waste_with_recovery,
    user_level_waste,
    user_level_waste_when_all_wait,
    wasted_fraction,
)

F = paper.FAILURE_RATE
HOUR = 3600.0


def percent(w: float) -> float:
    return 100 * wasted_fraction(w)


@pytest.mark.parametrize("row", paper.PERIODIC, ids=lambda row: row.name)
def test_table_8_of_periodic_checkpoints_follows_from_table_4(row: paper.Printed) -> None:
    work = paper.BY_NAME[row.name]
    for N, per_hour, printed, unit in zip(paper.SIZES, row.per_hour, row.percent, row.unit, strict=True):
        assert abs(HOUR * optimal_frequency(float(N), F, work.checkpoint) - per_hour) < (
            0.1 if per_hour == 15.6 else 0.01
        )
        w = least_periodic_waste(float(N), F, work.checkpoint, work.restore)
        if (row.name, N) == ("BERT-L-PT", 8192):  # printed is w*, before eq. 6
            assert round(100 * w, 1) == printed and round(percent(w), 2) == 4.35
        else:
            assert abs(percent(w) - printed) < unit


def test_the_exact_percentages_of_periodic_checkpoints() -> None:
    expected = {
        "BERT-L-PT": (0.096, 1.54, 4.35),
        "BERT-B-FT": (0.051, 0.83, 2.41),
        "GPT2-S": (0.084, 1.34, 3.78),
        "GPT2-8B": (0.187, 2.96, 8.25),
    }
    for name, numbers in expected.items():
        work = paper.BY_NAME[name]
        found = [
            percent(least_periodic_waste(float(N), F, work.checkpoint, work.restore)) for N in paper.SIZES
        ]
        assert [round(found[0], 3), round(found[1], 2), round(found[2], 2)] == list(numbers)


def test_equations_9_and_10_are_those_of_bert_l() -> None:
    work = paper.BY_NAME["BERT-L-PT"]
    assert round(1 / (HOUR * optimal_frequency(1.0, F, work.checkpoint)), 2) == 5.77
    assert round(5.77) == paper.HOURS_TO_CHECKPOINT
    of_root = 2 * math.sqrt(F * work.checkpoint / 2)
    assert abs(of_root - paper.OF_ROOT_N) < 0.1e-4 and abs(F * work.restore - paper.OF_N) < 0.1e-7


@pytest.mark.parametrize("name", paper.PC_MEM)
def test_table_3_has_what_checkpoints_to_memory_cost_at_each_jobs_own_size(name: str) -> None:
    work = paper.BY_NAME[name]
    found = 100 * optimal_frequency(float(work.gpus), F, work.checkpoint) * work.checkpoint
    assert abs(found - paper.PC_MEM[name]) < 0.001
    exact = {"GPT2-S": 0.042, "GPT2-XL": 0.079, "GPT2-8B": 0.187, "GPT2-18B": 0.276, "BERT-L-PT": 0.068,
             "BERT-B-FT": 0.036}  # fmt: skip
    assert round(found, 3) == exact[name]


@pytest.mark.parametrize("gpus", paper.DOLLARS_A_MONTH)
def test_the_dollars_of_a_month_are_the_papers(gpus: int) -> None:
    found = monthly_dollars_of_redone_work(gpus, 30 * gpus / 1000, 0.5, 4.0)
    assert found == paper.DOLLARS_A_MONTH[gpus]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("GPT2-8B", (0.0003, 0.071, 0.567)),
        ("BERT-L-PT", (0.0073, 0.031, 0.199)),
        ("GPT2-S", (0.0017, 0.019, 0.144)),
        ("BERT-B-FT", (0.0001, 0.021, 0.171)),
    ],
)
def test_user_level_rows_by_equation_7_from_table_4(name: str, expected: tuple[float, ...]) -> None:
    work = paper.BY_NAME[name]
    for N, wanted in zip(paper.SIZES, expected, strict=True):
        w = user_level_waste(float(N), F, work.checkpoint, work.steady_overhead, work.restore, work.minibatch)
        assert abs(percent(w) - wanted) < 0.001 if wanted >= 0.01 else round(percent(w), 4) == wanted


@pytest.mark.parametrize("row", paper.USER_LEVEL, ids=lambda row: row.name)
def test_printed_user_level_rows_take_table_3s_percentages_for_fractions(row: paper.Printed) -> None:
    work = paper.BY_NAME[row.name]
    overhead = {"BERT-B-FT": paper.JIT_C["GPT2-S"]}.get(row.name, paper.JIT_C[row.name])
    if row.name == "GPT2-8B":
        overhead = work.steady_overhead
    for N, printed, unit in zip(paper.SIZES, row.percent, row.unit, strict=True):
        w = user_level_waste(float(N), F, work.checkpoint, overhead, work.restore, work.minibatch)
        assert abs(percent(w) - printed) < 1.01 * unit, (N, percent(w), printed)


def test_transparent_rows_do_not_follow_from_table_5() -> None:
    by_name = {one.name: one for one in paper.TRANSPARENT}
    for row in paper.TRANSIENT:
        one = by_name[row.name]
        w = transparent_waste(8192.0, F, one.steady_overhead, one.minibatch)
        assert percent(w) < 0.6 * row.percent[0]
    gpt = by_name["GPT2-S"]
    assert round(percent(transparent_waste(4.0, F, gpt.steady_overhead, gpt.minibatch)), 2) == 0.37
    left_out = percent(
        transparent_waste_with_recovery(8192.0, F, gpt.steady_overhead, gpt.minibatch, gpt.recovery)
    ) - percent(transparent_waste(8192.0, F, gpt.steady_overhead, gpt.minibatch))
    assert round(left_out, 2) == 0.17


def test_equation_7_counts_a_checkpoint_for_one_gpu_where_all_wait() -> None:
    work = paper.BY_NAME["GPT2-8B"]
    arguments = (8192.0, F, work.checkpoint, work.steady_overhead, work.restore, work.minibatch)
    more = user_level_waste_when_all_wait(*arguments) - user_level_waste(*arguments)
    assert math.isclose(more, 8191 * F * work.checkpoint, rel_tol=1e-12)


def test_the_optimum_is_where_equation_2_is_zero_and_no_other_frequency_wastes_less() -> None:
    N, o, r, t = 1024.0, 5.0, 9.9, 1e6
    best = optimal_frequency(N, F, o)
    assert abs(marginal_work(best, N, F, o, t)) < 1e-6 * N * t * o
    least = least_periodic_work(N, F, o, r, t)
    assert math.isclose(least, periodic_work(best, N, F, o, r, t), rel_tol=1e-12)
    for factor in (0.5, 0.9, 0.999, 1.001, 1.1, 2.0):
        assert periodic_waste(factor * best, N, F, o, r) > least / (N * t)
