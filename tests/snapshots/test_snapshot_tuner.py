"""How often snapshots are taken: the formulae of PCcheck's section 3.4, and following what changes."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from understudy.recovery.snapshots.tuning import tuner
from understudy.recovery.snapshots.tuning.adapter import (
    CONVERGES_WITHIN,
    DRIFT,
    HOLD_S,
    WINDOW,
    Adapter,
    Observation,
    Scales,
    scaled,
)
from understudy.recovery.snapshots.tuning.tuner import (
    CannotTune,
    Choice,
    Limits,
    Measured,
    explain,
    longest_loss_s,
    tune,
)

GB = 10**9
ROUNDING = 1 + 1e-9

calm = settings(deadline=None, database=None, print_blob=True)  # the machine may be busy with other tests

# 16.2 GB as OPT-1.3B in the paper's Table 3; the times are made up to be easy to divide.
MADE_UP = Measured(
    step_s=0.5,
    state_bytes=int(16.2 * GB),
    device_to_host_bytes_s=12e9,
    write_time_s={1: 32.0, 2: 40.0, 4: 80.0},
    storage_bytes_s=0.8e9,
)
ROOMY = Limits(dram_bytes=32 * GB, storage_bytes=200 * GB, overhead=1.25)


@st.composite
def measurements(draw: st.DrawFn) -> Measured:
    """Write times that never fall as more are under way, and never beat the storage."""
    size = draw(st.integers(10**6, 10**11))
    alone = draw(st.floats(0.01, 100))
    storage = size / alone * draw(st.floats(0.5, 4))
    counts = draw(st.sets(st.integers(1, 8), min_size=1))
    times, previous = {}, alone
    for count in sorted(counts):
        previous = max(previous * draw(st.floats(1, 3)), size * count / storage)
        times[count] = previous
    return Measured(
        step_s=draw(st.floats(0.001, 10)),
        state_bytes=size,
        device_to_host_bytes_s=draw(st.floats(1e8, 1e11)),
        write_time_s=times,
        storage_bytes_s=storage,
        slowdown_while_persisting=draw(st.sampled_from([1.0, 1.001, 1.01, 1.1, 1.5, 3.0])),
    )


def limits_for(measured: Measured, slots: int, overhead: float) -> Limits:
    return Limits(2 * measured.state_bytes, slots * measured.state_bytes, overhead)


overheads = st.floats(1.001, 3)


# ------------------------------------------------------------------ the formulae
def test_equation_3_is_the_time_of_a_write_over_n_q_t_rounded_up() -> None:
    assert tuner.interval_by_paper(MADE_UP, 1, 1.25) == math.ceil(32 / (1 * 1.25 * 0.5)) == 52
    assert tuner.interval_by_paper(MADE_UP, 2, 1.25) == math.ceil(40 / (2 * 1.25 * 0.5)) == 32


def test_runtime_with_one_snapshot_at_a_time_is_the_papers_first_formula() -> None:
    """runtime_1 = f t + max(T_w, f t) (A / f - 1) + T_w."""
    assert tuner.runtime_s(100, 10, 1, 0.5, 32) == 10 * 0.5 + 32 * (100 / 10 - 1) + 32
    assert tuner.runtime_s(100, 10, 1, 0.5, 2) == 10 * 0.5 + 5 * (100 / 10 - 1) + 2


def test_a_stalled_training_takes_the_time_of_the_papers_equation_1() -> None:
    """f t + T_w A / (f N), if T_w > N f t."""
    assert tuner.runtime_s(1000, 10, 4, 0.5, 80) == 10 * 0.5 + 80 * 1000 / (10 * 4)


@calm
@given(measurements(), overheads)
def test_a_long_training_at_the_interval_of_equation_3_stays_within_equation_1(
    measured: Measured, overhead: float
) -> None:
    steps = 10**9
    for count, taken in measured.write_time_s.items():
        interval = tuner.interval_by_paper(measured, count, overhead)
        runtime = tuner.runtime_s(steps, interval, count, measured.step_s, taken)
        ignored = interval * measured.step_s + taken  # what eq. (2) leaves out: once, not per step
        assert runtime <= (overhead * steps * measured.step_s + ignored) * ROUNDING


def test_equation_4_bounds_the_loss_by_the_snapshots_under_way_or_by_the_time_of_a_write() -> None:
    """l + f t + t min(N f, T_w / t)."""
    choice = Choice(2, 3, 1, 1, 10, ())
    assert longest_loss_s(choice, MADE_UP, load_s=7) == 7 + 5 + 0.5 * 20  # stalled: (N + 1) f steps
    assert longest_loss_s(replace(choice, interval=100), MADE_UP, load_s=7) == 7 + 50 + 40  # not: T_w


# ------------------------------------------------------------------ N
def test_n_is_the_one_at_which_the_storage_finishes_snapshots_fastest() -> None:
    """32 / 1, 40 / 2, 80 / 4: of the two best, the smaller."""
    assert tune(MADE_UP, ROOMY).in_flight == 2


def test_n_leaves_one_slot_for_the_newest_durable_snapshot() -> None:
    faster = replace(MADE_UP, write_time_s={1: 32.0, 2: 40.0, 3: 45.0, 4: 50.0})
    chosen = [
        tune(faster, replace(ROOMY, storage_bytes=n * faster.state_bytes)).in_flight for n in (2, 3, 4, 9)
    ]
    assert chosen == [1, 2, 3, 4]


def test_write_times_that_were_not_measured_are_taken_rather_too_long() -> None:
    assert tuner.write_time(MADE_UP, 3) == pytest.approx(max(60, 3 * 16.2 / 0.8))  # 60.75: the storage's own
    assert tuner.write_time(MADE_UP, 8) == pytest.approx(max(160, 8 * 16.2 / 0.8))  # 162
    assert tuner.write_time(replace(MADE_UP, storage_bytes_s=1e9), 8) == 160  # in proportion: nothing is left
    assert tuner.write_time(replace(MADE_UP, write_time_s={4: 80.0}), 2) == 80


@calm
@given(measurements(), st.integers(1, 30))
def test_write_times_never_beat_the_storage(measured: Measured, count: int) -> None:
    at_best = measured.state_bytes * count / measured.storage_bytes_s
    assert tuner.write_time(measured, count) * ROUNDING >= at_best


@calm
@given(measurements(), st.integers(2, 12), st.integers(0, 12), overheads)
def test_more_storage_never_makes_the_time_per_snapshot_worse(
    measured: Measured, slots: int, more: int, overhead: float
) -> None:
    def per_snapshot(slots: int) -> float:
        choice = tune(measured, limits_for(measured, slots, overhead))
        assert 1 <= choice.in_flight <= slots - 1
        return tuner.write_time(measured, choice.in_flight) / choice.in_flight

    assert per_snapshot(slots + more) <= per_snapshot(slots)


# ------------------------------------------------------------------ f
@calm
@given(measurements(), st.integers(2, 9), overheads, st.floats(1, 2))
def test_a_larger_overhead_never_makes_the_interval_longer(
    measured: Measured, slots: int, overhead: float, factor: float
) -> None:
    tight = tune(measured, limits_for(measured, slots, overhead))
    loose = tune(measured, limits_for(measured, slots, overhead * factor))
    assert 1 <= loose.interval <= tight.interval


def test_writing_that_costs_nothing_leaves_equation_3_as_it_is() -> None:
    assert tune(MADE_UP, ROOMY).interval == tuner.interval_by_paper(MADE_UP, 2, ROOMY.overhead)


def test_writing_that_slows_training_makes_the_interval_longer_where_equation_3_would_break_its_word() -> (
    None
):
    """T_w(1) (1 - 1/s) / ((q - 1) t) = 32 * 0.2 / (0.01 * 0.5)."""
    slowed = replace(MADE_UP, slowdown_while_persisting=1.25)
    limits = replace(ROOMY, overhead=1.01)
    by_paper = tuner.interval_by_paper(slowed, 2, 1.01)
    assert by_paper == 40
    assert simulated_overhead(slowed, 2, by_paper) == pytest.approx(1.25, rel=0.01)
    choice = tune(slowed, limits)
    assert choice.interval in (1280, 1281)
    assert simulated_overhead(slowed, 2, choice.interval) <= 1.01 * ROUNDING
    assert "writing must pause" in choice.explained[-1]


def test_a_snapshot_after_every_step_is_chosen_where_it_costs_little() -> None:
    quick = replace(MADE_UP, write_time_s={1: 0.1})
    assert tune(quick, ROOMY).interval == 1
    assert "after every step" in tune(quick, ROOMY).explained[-1]


def simulated_overhead(measured: Measured, slots: int, interval: int) -> float:
    """Time of training with snapshots over that without, step by step rather than by a formula.

    With n under way, each is written at the rate 1 / T_w(n), and training runs at 1 / s; it waits for a slot
    where all are taken.  The last half is counted, when as many as ever are under way; and that in rounds of
    as many intervals as there are slots, since all of them may be filled and then waited for together.
    """
    half = slots * math.ceil(30 / slots)
    left: list[float] = []  # shares of the snapshots under way
    now = work = half_at = 0.0
    for number in range(2 * half):
        if number == half:
            half_at = now
        work = interval * measured.step_s
        while work > 1e-12 or len(left) == slots:
            speed = 0.0 if work <= 1e-12 else (1 / measured.slowdown_while_persisting if left else 1.0)
            taken = tuner.write_time(measured, len(left)) if left else math.inf
            until_done = min(left) * taken if left else math.inf
            passed = min(until_done, work / speed if speed else math.inf)
            now += passed
            work -= passed * speed
            left = [share - passed / taken for share in left]
            left = [share for share in left if share > 1e-12]
        left.append(1.0)
    return (now - half_at) / (half * interval * measured.step_s)


@calm
@given(measurements(), st.integers(2, 9), overheads)
@example(Measured(1.0, 1_000_000, 1e8, {8: 16.0}, 5e5, 1.0), 9, 2.0)  # eight at once, 16 s
def test_training_stays_within_the_overhead_at_the_chosen_interval(
    measured: Measured, slots: int, overhead: float
) -> None:
    choice = tune(measured, limits_for(measured, slots, overhead))
    assert simulated_overhead(measured, choice.in_flight, choice.interval) <= overhead * (1 + 1e-6)
    assert tuner.expected_overhead(measured, choice.in_flight, choice.interval) <= overhead * ROUNDING


# ------------------------------------------------------------------ b, c, p
def test_a_chunk_is_what_saturates_the_device_and_lies_where_the_paper_found_it() -> None:
    choice = tune(MADE_UP, ROOMY)
    assert 100e6 <= choice.chunk_bytes <= 500e6
    assert choice.chunk_bytes % 4096 == 0


def test_chunks_shrink_until_two_fit_into_memory() -> None:
    choice = tune(MADE_UP, replace(ROOMY, dram_bytes=20 << 20))
    assert (choice.chunk_bytes, choice.chunks) == (10 << 20, 2)
    assert "memory is short" in choice.explained[2]


@calm
@given(measurements(), st.integers(2, 9), st.integers(1 << 20, 10**12))
def test_chunks_fit_into_memory_and_hold_no_more_than_the_snapshots_under_way(
    measured: Measured, slots: int, memory: int
) -> None:
    choice = tune(measured, replace(limits_for(measured, slots, 1.1), dram_bytes=memory))
    assert 0 < choice.chunk_bytes * choice.chunks <= memory
    assert choice.chunk_bytes * (choice.chunks - choice.in_flight) <= choice.in_flight * measured.state_bytes


def test_threads_are_the_fastest_of_those_measured_or_the_papers_middle() -> None:
    assert tune(MADE_UP, ROOMY).threads == 3
    swept = replace(MADE_UP, thread_time_s={1: 44.0, 2: 32.0, 4: 32.0})
    assert tune(swept, ROOMY).threads == 2


# ------------------------------------------------------------------ refusals
def test_storage_for_less_than_two_snapshots_is_refused_in_a_sentence() -> None:
    limits = replace(ROOMY, storage_bytes=2 * MADE_UP.state_bytes - 1)
    with pytest.raises(CannotTune, match=r"do not hold two snapshots of 16.2 GB each.*give at least 32.4 GB"):
        tune(MADE_UP, limits)


def test_memory_below_one_chunk_is_refused_in_a_sentence() -> None:
    with pytest.raises(CannotTune, match=r"4.1 kB of host memory are less than one chunk of 1.05 MB"):
        tune(MADE_UP, replace(ROOMY, dram_bytes=4100))


def test_an_overhead_that_leaves_no_time_is_refused() -> None:
    with pytest.raises(CannotTune, match=r"factor on the training time above 1, such as 1\.03"):
        replace(ROOMY, overhead=1.0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"step_s": 0.0}, "step_s is 0.0: it must be more than 0"),
        ({"storage_bytes_s": math.nan}, "storage_bytes_s is nan"),
        ({"write_time_s": {}}, "no write time was measured"),
        ({"write_time_s": {0: 1.0}}, "write_time_s has an entry for 0"),
        ({"write_time_s": {1: -1.0}}, "write_time_s of 1 is -1.0"),
        ({"slowdown_while_persisting": 0.9}, "factor on the step time, 1 or more"),
    ],
)
def test_values_that_no_measurement_gives_are_refused(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(CannotTune, match=sentence):
        replace(MADE_UP, **change)  # type: ignore[arg-type]


# ------------------------------------------------------------------ words
def test_the_explanation_names_every_decision_with_its_unit_and_what_a_recovery_costs() -> None:
    told = explain(tune(MADE_UP, ROOMY), MADE_UP, ROOMY)
    for part in (
        "16.2 GB every 32 steps", "up to 2 under way",
        "N* = 2: the storage then finishes a snapshot every 20 s",
        "p = 3", "b = 120 MB", "f* = 32 steps", "eq. 3", "1.25 times as long (allowed 1.25)",
        "48.6 GB of 200 GB storage", "at most 48 s again (eq. 4)",
    ):  # fmt: skip
        assert part in told, f"{part!r} is not in:\n{told}"


# ------------------------------------------------------------------ following what changes
def watched(adapter: Adapter, world: Sequence[Measured], apart_s: float = HOLD_S) -> list[Adapter]:
    """The adapter after each observation of a machine that is as `world` says, one after the other."""
    adapters = []
    for number, now in enumerate(world, 1):
        count = adapter.choice.in_flight
        seen = Observation(
            number * apart_s, now.step_s, tuner.write_time(now, count), count, now.storage_bytes_s
        )
        adapter = adapter.observed(seen)
        adapters.append(adapter)
    return adapters


def noisy(measured: Measured, count: int, seed: int) -> list[Measured]:
    chance = random.Random(seed)
    around = [Scales(*(chance.uniform(0.9, 1.1) for _ in range(3))) for _ in range(count)]
    return [scaled(measured, by) for by in around]


factors = st.one_of(st.floats(0.1, 0.79), st.floats(1.26, 10))


@calm
@given(measurements(), overheads)
def test_what_stays_as_it_was_never_changes_the_choice(measured: Measured, overhead: float) -> None:
    begun = Adapter.begin(measured, limits_for(measured, 5, overhead))
    assert {id(after.choice) for after in watched(begun, [measured] * 30)} == {id(begun.choice)}


@calm
@given(measurements(), overheads, factors, factors, factors, st.integers(0, 2 * WINDOW))
def test_a_lasting_change_is_tuned_for_within_a_few_observations_and_then_settled(
    measured: Measured, overhead: float, step: float, write: float, storage: float, before: int
) -> None:
    limits = limits_for(measured, 5, overhead)
    changed = scaled(measured, Scales(step, write, storage))
    adapters = watched(Adapter.begin(measured, limits), [measured] * before + [changed] * 30)
    settled = adapters[before + CONVERGES_WITHIN - 1].choice
    assert all(after.choice is settled for after in adapters[before + CONVERGES_WITHIN :])
    now = adapters[-1].measured_now
    assert now.step_s == pytest.approx(changed.step_s)
    assert now.storage_bytes_s == pytest.approx(changed.storage_bytes_s)
    count = adapters[before].choice.in_flight
    assert tuner.write_time(now, count) == pytest.approx(tuner.write_time(changed, count))
    assert settled == tune(now, limits)


@calm
@given(st.floats(0.2, 1), st.floats(0.01, 1), st.floats(0.2, 1), st.integers(2, 9))
def test_writes_and_storage_that_contradict_each_other_lead_to_one_choice_not_to_two_in_turns(
    at_one: float, storage: float, write: float, slots: int
) -> None:
    """Observed: storage that got slower and writes that got faster, differently so at each N."""
    measured = replace(MADE_UP, write_time_s={1: 32.0, 8: 200.0})
    limits = limits_for(measured, slots, 1.1)
    adapter = Adapter.begin(measured, limits)
    choices = []
    for number in range(100):
        count = adapter.choice.in_flight
        taken = tuner.write_time(measured, count) * (at_one if count == 1 else write)
        seen = Observation(number * HOLD_S, 0.5, taken, count, measured.storage_bytes_s * storage)
        adapter = adapter.observed(seen)
        choices.append(adapter.choice)
    assert len({id(choice) for choice in choices[CONVERGES_WITHIN:]}) == 1


def test_after_a_change_the_choice_is_the_one_of_a_fresh_measurement() -> None:
    for by in (Scales(2, 1, 1), Scales(1, 4, 0.25), Scales(0.5, 0.25, 2)):  # exact in binary
        changed = scaled(MADE_UP, by)
        adapters = watched(Adapter.begin(MADE_UP, ROOMY), [MADE_UP] * 20 + [changed] * CONVERGES_WITHIN)
        assert adapters[-1].choice == tune(changed, ROOMY) != tune(MADE_UP, ROOMY)


@calm
@given(measurements(), overheads, st.integers(0, 2**32))
def test_noise_of_ten_per_cent_never_changes_the_choice(
    measured: Measured, overhead: float, seed: int
) -> None:
    begun = Adapter.begin(measured, limits_for(measured, 5, overhead))
    assert {id(after.choice) for after in watched(begun, noisy(measured, 100, seed))} == {id(begun.choice)}


@calm
@given(measurements(), st.lists(st.sampled_from([0.9, 1.0, 1.1]), min_size=40, max_size=80))
def test_noise_of_ten_per_cent_never_changes_even_what_was_tuned_at_its_edge(
    measured: Measured, swings: list[float]
) -> None:
    limits = limits_for(measured, 5, 1.1)
    begun = Adapter.begin(scaled(measured, Scales(0.9, 0.9, 0.9)), limits)
    world = [scaled(measured, Scales(by, by, by)) for by in swings]
    assert {id(after.choice) for after in watched(begun, world)} == {id(begun.choice)}


@pytest.mark.parametrize(("before", "odd"), [(0, 1), (WINDOW, WINDOW // 2)])
def test_a_few_odd_observations_change_nothing(before: int, odd: int) -> None:
    slow = scaled(MADE_UP, Scales(3, 3, 0.3))
    world = [MADE_UP] * before + [slow] * odd + [MADE_UP] * WINDOW
    begun = Adapter.begin(MADE_UP, ROOMY)
    assert all(after.choice is begun.choice for after in watched(begun, world))


def test_what_comes_and_goes_changes_the_choice_no_oftener_than_it_is_held() -> None:
    slow = scaled(MADE_UP, Scales(3, 3, 0.3))
    world = ([MADE_UP] * WINDOW + [slow] * WINDOW) * 20
    adapters = watched(Adapter.begin(MADE_UP, ROOMY), world, apart_s=1.0)
    changes = [b.seen_s for a, b in itertools.pairwise(adapters) if a.choice is not b.choice]
    assert changes and all(b - a >= HOLD_S for a, b in itertools.pairwise(changes))


def test_a_drift_below_the_threshold_is_left_alone() -> None:
    begun = Adapter.begin(MADE_UP, ROOMY)
    slower = scaled(MADE_UP, Scales(1 / (1 - DRIFT) - 0.01, 1 - DRIFT + 0.01, 1))
    assert watched(begun, [slower] * 40)[-1].choice is begun.choice


def test_an_observation_from_the_past_is_refused() -> None:
    seen = Adapter.begin(MADE_UP, ROOMY).observed(Observation(5.0, step_s=0.5))
    with pytest.raises(CannotTune, match=r"an observation of 4.0 s came after one of 5.0 s"):
        seen.observed(Observation(4.0, step_s=0.5))
