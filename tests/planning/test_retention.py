"""What retention lets go, and what it never does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from mirrors import Stores

from understudy.recovery.snapshots.stores.catalogue import read_catalogue
from understudy.recovery.snapshots.stores.retention import (
    KeptSet,
    LocalRun,
    Retention,
    newest_first,
    superfluous_runs,
    superfluous_sets,
)

RUNS = ("a", "b", "c")


@st.composite
def histories(draw: st.DrawFn) -> list[KeptSet]:
    """Sets of up to three runs: serials and steps rise within a run, clocks do as they like."""
    found = []
    for run in RUNS[: draw(st.integers(1, 3))]:
        serial = step = 0
        for _ in range(draw(st.integers(0, 8))):
            serial += draw(st.integers(1, 5))
            step += draw(st.integers(0, 40))
            found.append(KeptSet(run, serial, step, draw(st.integers(0, 1000))))
    return draw(st.permutations(found))


rules = st.builds(Retention, st.integers(1, 5), st.sampled_from([0, 1, 7, 50]))


def newest_of(sets: list[KeptSet], run: str) -> KeptSet | None:
    return max((one for one in sets if one.run == run), key=lambda one: one.serial, default=None)


@given(histories(), st.sampled_from(RUNS), rules)
@settings(max_examples=500, deadline=None)
def test_what_goes_was_there_once_and_enough_stays(
    sets: list[KeptSet], present: str, rule: Retention
) -> None:
    gone = superfluous_sets(sets, present, rule)
    left = [one for one in sets if one not in gone]
    assert len(gone) == len(set(gone)) and set(gone) <= set(sets)
    assert len(left) >= min(len(sets), rule.keep_last)
    if not rule.keep_every:
        assert len(left) == min(len(sets), rule.keep_last)


@given(histories(), st.sampled_from(RUNS), rules)
@settings(max_examples=500, deadline=None)
def test_the_newest_sets_of_the_present_run_stay_whatever_the_clock_said(
    sets: list[KeptSet], present: str, rule: Retention
) -> None:
    gone = superfluous_sets(sets, present, rule)
    ours = sorted((one for one in sets if one.run == present), key=lambda one: one.serial)
    assert not set(ours[-rule.keep_last :]) & set(gone)


@given(histories(), st.sampled_from(RUNS), rules)
@settings(max_examples=500, deadline=None)
def test_the_first_set_of_every_so_many_steps_stays_for_ever(
    sets: list[KeptSet], present: str, rule: Retention
) -> None:
    gone = superfluous_sets(sets, present, rule)
    left = [one for one in sets if one not in gone]
    if rule.keep_every:
        for one in gone:
            interval = one.step // rule.keep_every
            assert any(
                other.run == one.run and other.serial < one.serial
                and other.step // rule.keep_every == interval
                for other in left
            )  # fmt: skip


@given(histories(), st.sampled_from(RUNS), rules)
@settings(max_examples=500, deadline=None)
def test_what_was_kept_once_is_kept_again(sets: list[KeptSet], present: str, rule: Retention) -> None:
    in_order = sorted(sets, key=lambda one: (one.run, one.serial))
    sets = [replace(one, time_ns=now) for now, one in enumerate(in_order)]  # a clock that only rises
    gone = superfluous_sets(sets, present, rule)
    assert superfluous_sets([one for one in sets if one not in gone], present, rule) == []


@given(histories(), st.sampled_from(RUNS), rules)
@settings(max_examples=200, deadline=None)
def test_the_order_in_which_sets_are_told_changes_nothing(
    sets: list[KeptSet], present: str, rule: Retention
) -> None:
    assert superfluous_sets(sets, present, rule) == superfluous_sets(sets[::-1], present, rule)


def test_keep_last_two_and_every_hundred_steps() -> None:
    sets = [KeptSet("a", serial, 40 * serial, serial) for serial in range(1, 11)]
    gone = superfluous_sets(sets, "a", Retention(2, 100))
    assert [one.step for one in sets if one not in gone] == [40, 120, 200, 320, 360, 400]


local_runs = st.lists(
    st.builds(LocalRun, st.sampled_from("abcdefgh"), st.integers(0, 100), st.booleans(), st.booleans()),
    unique_by=lambda run: run.name,
)


@given(local_runs, st.sampled_from("abcdefgh"), st.integers(1, 4))
@settings(max_examples=500, deadline=None)
def test_old_runs_go_only_once_the_present_one_holds_a_complete_set(
    runs: list[LocalRun], present: str, keep: int
) -> None:
    gone = superfluous_runs(runs, present, keep)
    by_name = {run.name: run for run in runs}
    assert present not in gone and len(gone) == len(set(gone))
    assert all(by_name[name].readable for name in gone)
    left = [run for run in runs if run.name not in gone]
    if not (present in by_name and by_name[present].complete):
        assert gone == []
    complete = sum(run.complete for run in runs)
    assert sum(run.complete for run in left) >= min(complete, keep)
    for name in gone:
        if by_name[name].complete:
            newer = [
                r
                for r in left
                if r.complete and (r.name == present or r.newest_ns >= by_name[name].newest_ns)
            ]
            assert len(newer) >= keep


def test_a_newer_set_comes_first_though_an_older_one_of_its_run_was_written_later(tmp_path: Path) -> None:
    stores = Stores(tmp_path)
    stores.put(1, run="first")
    stores.put(3, run="second")
    stores.put(2, run="second")  # it waited for a thread of its writer
    assert [(one.run, one.serial) for one in read_catalogue(tmp_path).sets] == [
        ("second", 3), ("second", 2), ("first", 1),
    ]  # fmt: skip
    ages = [("a", 9, 5), ("b", 1, 6), ("b", 2, 4)]
    assert newest_first(ages, lambda one: one) == [("b", 2, 4), ("b", 1, 6), ("a", 9, 5)]
