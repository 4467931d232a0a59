"""Simulated months of a job: every second accounted for, and the formulas' numbers where these hold."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from typing import Any

import numpy
import pytest
from made_up_costs import inputs

from understudy.recovery.base.errors import BadInput
from understudy.recovery.costs.bill import LARGEST, LATE_AT_MOST, crossovers, fractions, spares_for
from understudy.recovery.costs.comparing import MONTH_S, simulated
from understudy.recovery.costs.given.inputs import Inputs, Law
from understudy.recovery.costs.models.failures import Event, of_trace, single
from understudy.recovery.costs.models.formulas import (
    least_periodic_waste,
    transparent_waste_with_recovery,
    user_level_waste_when_all_wait,
)
from understudy.recovery.costs.models.goodput_model import Trace
from understudy.recovery.costs.models.pacing import Pace
from understudy.recovery.costs.models.rungs import Failure
from understudy.recovery.costs.models.simulation import Account, one_job, simulate
from understudy.recovery.costs.models.ways import Way, waste_of

NOTHING_ELSE = itertools.repeat(0.5)
CHEAP: dict[str, Any] = {
    "periodic": {"checkpoint_s": 0.2, "restore_s": 3.0},
    "user_level": {"checkpoint_s": 0.2, "restore_s": 3.0},
}
"""So little is wasted that failures within recoveries do not count, as the formulas have it."""


def day(made: Inputs, way: Way, *events: Event, seconds: float = 86_400.0) -> Account:
    return simulate(made, way, iter(events), seconds, NOTHING_ELSE)


# ------------------------------------------------------------------ beside the formulas
@pytest.mark.parametrize("way", list(Way))
def test_simulation_and_formulas_agree_within_two_percent_where_these_hold(way: Way) -> None:
    made = inputs(**CHEAP, ours={"stored": {"every_s": 300.0, "cost_s": 0.1, "durable_s": 5.0},
                                 "images": {"every_s": 60.0, "cost_s": 0.01, "durable_s": 2.0}})  # fmt: skip
    found = simulated(made, way, 400, first_seed=7)
    assert found.failures > 20_000
    assert abs(found.mean / found.formula - 1) < 0.02, found


def test_every_second_of_every_month_is_accounted_for() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    told = {"law": "weibull", "shape": 0.7, "bursts_per_rack_day": 0.05, "preempted_per_host_day": 0.1,
            "notice_s": 30.0, "move_s": 5.0}  # fmt: skip
    made = inputs(
        simulation=told,
        devices={"spares": 40, "repair_hours": 5.0},
        user_level={"backup": {"every_s": 3600.0, "cost_s": 1.0, "durable_s": 0.0}},
        transparent={"backup": {"every_s": 3600.0, "cost_s": 1.0, "durable_s": 0.0}},
    )
    for way in Way:
        found = one_job(made, way, MONTH_S, seed)
        assert math.isclose(found.total, MONTH_S, rel_tol=1e-9)
        parts = (found.useful, found.steady, found.detection, found.recovery, found.redone, found.waiting)
        assert min(parts) >= 0 and found.failures and sum(found.rungs.values()) == found.failures


def test_failures_that_come_on_top_of_each_other_are_accounted_for_too() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    choose = random.Random(seed)
    told = {"law": "exponential", "notice_s": 30.0, "move_s": 5.0}
    for _ in range(40):
        made = inputs(
            job={"gpus": 64, "replicas": choose.choice([2, 8, 64])},
            simulation=told,
            devices={"spares": choose.choice([0, 3, 30, 1000]), "repair_hours": choose.choice([0.01, 1.0])},
            periodic={"checkpoint_s": choose.choice([0.5, 30.0])},
        )
        at, events = 0.0, []
        for _ in range(choose.randrange(60)):
            at += choose.choice([0.0, 0.01, 1.0, 7.0, 100.0, 4000.0])
            kind = choose.choice(list(Failure))
            ranks = choose.sample(range(64), choose.choice([1, 1, 2, 8]))
            noticed, repaired = choose.random() < 0.3, choose.random() < 0.8
            lost = Event(at, dict.fromkeys(ranks, kind), noticed=noticed, repaired=repaired)
            events.append(lost if choose.random() < 0.8 else Event(at, returned=choose.randrange(4)))
        seconds = at * choose.choice([0.5, 1.0, 1.5]) + 10.0
        for way in Way:
            found = day(made, way, *events, seconds=seconds)
            assert math.isclose(found.total, seconds, rel_tol=1e-9), way
            parts = (found.useful, found.steady, found.detection, found.recovery, found.redone, found.waiting)
            assert min(parts) >= -1e-9, way


def test_all_ways_meet_the_same_failures() -> None:
    made = inputs()
    assert len({one_job(made, way, MONTH_S, 3).failures for way in Way}) == 1
    assert one_job(made, Way.OURS, MONTH_S, 3) == one_job(made, Way.OURS, MONTH_S, 3)


# ------------------------------------------------------------------ one failure at a time
def test_a_failed_server_costs_detection_recovery_and_half_a_minibatch() -> None:
    free = {"every_s": 1000.0, "cost_s": 0.0, "durable_s": 0.0}
    made = inputs(ours={"overhead": 0.0, "images": None, "stored": free})
    found = day(made, Way.OURS, Event(1000.0, {3: Failure.SERVER}))
    assert (found.detection, found.recovery, found.waiting) == (0.05, 2.0, 0.0)
    assert math.isclose(found.redone, made.job.minibatch_s / 2)
    assert math.isclose(found.useful, 86_400 - 2.05 - found.redone) and found.rungs == {
        "restart-copy-replay": 1
    }


def test_periodic_checkpoints_lose_what_came_behind_the_newest() -> None:
    made = inputs()
    every = 1 / (made.job.gpus * made.failures.rate / (2 * 18.8)) ** 0.5
    at = 2 * (every + 18.8) + 100.0
    found = day(made, Way.PERIODIC, Event(at, {3: Failure.SERVER}), seconds=at + 28.6)
    assert math.isclose(found.redone, 100.0, abs_tol=1e-6) and found.recovery == 28.6
    assert math.isclose(found.useful, 2 * every) and math.isclose(found.steady, 2 * 18.8)


def test_a_second_failure_in_a_recovery_begins_it_again_with_both_down() -> None:
    made = inputs(job={"gpus": 64, "replicas": 2}, ours={"overhead": 0.0, "images": None})
    lone = day(made, Way.OURS, Event(10_000.0, {3: Failure.SERVER}))
    both = day(made, Way.OURS, Event(10_000.0, {3: Failure.SERVER}), Event(10_001.0, {35: Failure.SERVER}))
    assert lone.rungs == {"restart-copy-replay": 1} and lone.redone < 2
    assert both.rungs == {"restart-copy-replay": 1, "restore-stored-replay": 1}
    assert math.isclose(both.redone, 10_000 / (1 + 1 / 1800) % 1800 + 0.0, rel_tol=0.01)
    assert math.isclose(both.recovery + both.detection, 1.0 + 0.05 + 30.0)


def test_a_failure_without_a_spare_waits_for_a_repair_and_then_the_job_begins_from_what_is_stored() -> None:
    made = inputs(devices={"spares": 1, "repair_hours": 1.0}, ours={"images": None})
    found = day(made, Way.OURS, Event(5000.0, {3: Failure.DEVICE}), Event(6000.0, {4: Failure.DEVICE}))
    assert found.rungs == {"restart-copy-replay": 1, "give-up": 1}
    assert math.isclose(found.waiting, 5000 + 3600 - 6000) and found.recovery == 2.0 + 60.0


def test_devices_of_a_trace_come_back_when_it_says_so() -> None:
    made = inputs(devices={"spares": 0, "repair_hours": 1.0}, ours={"images": None})
    lost = Event(5000.0, {3: Failure.DEVICE}, repaired=False)
    found = day(made, Way.OURS, lost, Event(9000.0, returned=1))
    assert found.waiting == 4000.0 and found.rungs == {"give-up": 1}
    never = day(made, Way.OURS, lost)
    assert math.isclose(never.waiting, 86_400 - 5000) and never.useful < 5000


def test_a_host_that_is_taken_away_with_notice_costs_a_move() -> None:
    told = {"law": "exponential", "notice_s": 30.0, "move_s": 5.0}
    host = Event(1000.0, dict.fromkeys(range(8, 16), Failure.HOST), noticed=True)
    moved = day(inputs(simulation=told), Way.OURS, host)
    assert moved.moves == 1 and moved.recovery == 5.0 and not moved.failures
    late = day(inputs(simulation=told | {"notice_s": 2.0}), Way.OURS, host)
    assert late.rungs == {"restore-snapshot-replay": 1} and not late.moves
    assert day(inputs(simulation=told), Way.PERIODIC, host).rungs == {"restart": 1}


def test_a_burst_that_takes_every_replica_costs_user_level_checkpoints_all_since_their_backup() -> None:
    made = inputs(job={"gpus": 64, "replicas": 2})
    burst = Event(10_000.0, dict.fromkeys([3, 35], Failure.SERVER))
    assert math.isclose(day(made, Way.USER_LEVEL, burst).redone, 10_000.0)
    backed = inputs(
        job={"gpus": 64, "replicas": 2},
        user_level={"backup": {"every_s": 3000.0, "cost_s": 0.0, "durable_s": 0.0}},
    )
    assert math.isclose(day(backed, Way.USER_LEVEL, burst).redone, 1000.0)


# ------------------------------------------------------------------ parts
def test_a_pace_comes_as_far_as_one_that_is_walked_second_by_second() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    choose = random.Random(seed)
    for _ in range(30):
        pace = Pace(choose.choice([0.0, 0.25]), choose.choice([16.0, 40.0]), choose.choice([0.0, 3.0]),
                    choose.choice([0.0, 9.0]))  # fmt: skip
        useful = choose.randrange(100) / 2
        kept = useful // pace.every * pace.every
        ticks = choose.randrange(100, 60_000)  # of 10 ms; useful time in 2 ms, so that all are whole numbers
        walked, stopped, begun = round(500 * useful), 0, [(-10_000, kept)]
        a_tick, every = (5 if pace.overhead == 0 else 4), round(500 * pace.every)
        for number in range(ticks):
            if stopped:
                stopped -= 1
                continue
            before = walked
            walked += a_tick
            if walked // every > before // every:
                begun.append((number + 1, walked // every * pace.every))
                stopped = round(100 * pace.stop)
        come, newest = pace.advance(useful, kept, ticks / 100)
        assert abs(come - walked / 500) < 0.011 * len(begun)
        counts_after = round(100 * (pace.stop + pace.durable))
        ends = [at + counts_after for at, _ in begun]
        if all(abs(end - ticks) > len(begun) for end in ends):  # no rounding of a tick decides
            assert newest == max(step for (_, step), end in zip(begun, ends, strict=True) if end <= ticks)


@pytest.mark.parametrize("law", list(Law))
def test_failures_come_as_often_as_their_rate_says_under_either_law(law: Law) -> None:
    made = inputs()
    generator = numpy.random.default_rng(11)
    counts = [
        sum(1 for _ in single(made.job.layout, made.failures, law, 0.6, MONTH_S, generator))
        for _ in range(60)
    ]
    expected = made.job.gpus * made.failures.per_gpu_day * 30
    assert abs(statistics.fmean(counts) / expected - 1) < 0.06


def test_a_trace_is_scaled_to_the_job() -> None:
    made = inputs()
    trace = Trace(((0.0, 32), (10.0, 24), (20.0, 32)))
    lost, back = of_trace(made.job.layout, trace, numpy.random.default_rng(1))
    assert len(lost.failed) == 256 and set(lost.failed.values()) == {Failure.DEVICE} and not lost.repaired
    assert (back.returned, back.at) == (256, 20.0)


def test_spares_are_as_many_as_a_count_of_repairs_says() -> None:
    made = inputs(devices={"spares": 0, "repair_hours": 24.0})
    wanted = spares_for(made, LATE_AT_MOST)
    generator = numpy.random.default_rng(5)
    batches = made.job.gpus * made.failures.per_gpu_day * 0.3
    numbers = generator.poisson(batches, 200_000)
    hosts = generator.binomial(numbers, 0.05 / 0.3)
    in_repair = numbers - hosts + 8 * hosts
    late = (in_repair + 8 > wanted).mean()
    assert late <= 1.3 * LATE_AT_MOST and (in_repair + 8 > wanted - 2).mean() > LATE_AT_MOST


def test_a_way_that_loses_all_with_a_single_host_is_refused_with_a_sentence() -> None:
    made = inputs(ours={"images": None, "stored": None})
    with pytest.raises(BadInput, match="of kind host would end the job, and nothing is stored"):
        waste_of(Way.OURS, made)


def test_ways_are_the_papers_equations() -> None:
    made = inputs()
    N, f, m = float(made.job.gpus), made.failures.rate, made.job.minibatch_s
    assert math.isclose(
        waste_of(Way.PERIODIC, made).total, least_periodic_waste(N, f, 18.8, 28.6), rel_tol=1e-12
    )
    user_level = user_level_waste_when_all_wait(N, f, 18.8, 0.0, 28.6, m)
    assert math.isclose(waste_of(Way.USER_LEVEL, made).total, user_level, rel_tol=1e-12)
    recovery = 0.7 * 16.4 + 0.3 * 23.07
    transparent = transparent_waste_with_recovery(N, f, 0.0, m, recovery)
    assert math.isclose(waste_of(Way.TRANSPARENT, made).total, transparent, rel_tol=1e-12)


def test_a_model_is_not_reckoned_on_fewer_gpus_than_it_has_shards() -> None:
    made = inputs()
    wasted = fractions(Way.OURS, made, numpy.array([1, 15, 16, 31, 32]))
    assert numpy.isnan(wasted).tolist() == [True, True, False, False, False]
    assert all(one.gpus > 16 for one in crossovers(made, list(Way)))


def test_formulas_of_all_sizes_take_a_tenth_of_a_second() -> None:
    made = inputs()
    sizes = numpy.arange(1, LARGEST + 1)
    taken = []
    for _ in range(5):
        began = time.process_time()
        curves = [fractions(way, made, sizes) for way in Way]
        taken.append(time.process_time() - began)
    assert min(taken) < 0.1
    for way, curve in zip(Way, curves, strict=True):
        assert math.isclose(curve[made.job.gpus - 1], waste_of(way, made).fraction, rel_tol=1e-12)


@pytest.mark.long
def test_a_thousand_months_of_ten_thousand_gpus_take_less_than_a_minute() -> None:
    made = inputs(job={"gpus": 10_000, "replicas": 625})
    began = time.process_time()
    found = simulated(made, Way.OURS, 1000)
    assert time.process_time() - began < 60 and found.failures > 500_000
