"""Which rung a failure takes: a table for large jobs says what the planner says of smaller ones."""

from __future__ import annotations

import random

import pytest

from understudy.recovery.costs.models.layout import Layout
from understudy.recovery.costs.models.rungs import (
    ASKED_EVERY_TIME,
    Failed,
    Failure,
    Kept,
    Ladder,
    by_rule,
    facts_of,
)
from understudy.recovery.planning.planner import PlanName, plan


def some_case(choose: random.Random, gpus: int) -> tuple[Layout, Kept, Failed, int]:
    """Any layout of so many ranks, anything kept, anything failed at once, any number of spares."""
    layout = Layout(gpus, choose.choice([1, 2, 4, 8, gpus]), choose.choice([1, 2, 4, 8]))
    failed: dict[int, Failure] = {}
    for _ in range(choose.choice([1, 1, 1, 2, 3, 30])):
        how, rank = choose.choice(list(Failure)), choose.randrange(gpus)
        ranks = layout.on_host(layout.host_of(rank)) if how is Failure.HOST else (rank,)
        failed |= dict.fromkeys(ranks, how)
    if choose.random() < 0.05:
        failed = {rank: choose.choice(list(Failure)) for rank in range(gpus)}
    kept = Kept(*(choose.random() < 0.5 for _ in range(3)))
    return layout, kept, failed, choose.choice([0, 1, 2, 8, 1000])


@pytest.mark.parametrize("gpus", [8, 64, 128, ASKED_EVERY_TIME])
def test_the_table_and_what_is_remembered_are_the_planners_own_answers(gpus: int) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    choose = random.Random(seed)
    met = set()
    for _ in range(16_000 // gpus):
        layout, kept, failed, free = some_case(choose, gpus)
        answer = plan(facts_of(layout, kept, failed, free)).name
        assert by_rule(layout, kept, failed, free) is answer, (layout, kept, failed, free)
        assert Ladder(layout, kept).rung(failed, free) is answer, (layout, kept, failed, free)
        met.add(answer)
    assert len(met) >= 4


def test_a_ladder_that_remembers_answers_as_a_fresh_one_does() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    choose = random.Random(seed)
    layout, kept, _, _ = some_case(choose, 32)
    ladder = Ladder(layout, kept)
    for _ in range(300):
        _, _, failed, free = some_case(choose, 32)
        failed = {rank: how for rank, how in failed.items() if rank < layout.gpus}
        assert ladder.rung(failed, free) is plan(facts_of(layout, kept, failed, free)).name


def test_each_kind_of_failure_takes_the_rung_that_the_design_gives_it() -> None:
    layout = Layout(64, 8)
    all_kept = Kept(images=True, stored=True)
    alone = {kind: {9: kind} for kind in Failure} | {
        Failure.HOST: dict.fromkeys(layout.on_host(1), Failure.HOST)
    }
    assert {kind: Ladder(layout, all_kept).rung(failed, 8) for kind, failed in alone.items()} == {
        Failure.TRANSIENT: PlanName.REWIND_IN_PLACE,
        Failure.SERVER: PlanName.RESTART_COPY_REPLAY,
        Failure.DRIVER: PlanName.STASH_RESTART_RESTORE,
        Failure.DEVICE: PlanName.RESTART_COPY_REPLAY,
        Failure.HOST: PlanName.RESTORE_SNAPSHOT_REPLAY,
    }


def test_all_replicas_of_a_shard_at_once_need_what_is_stored() -> None:
    layout = Layout(64, 2)
    both = {5: Failure.SERVER, 37: Failure.SERVER}
    assert layout.lost_shards(both) == 1
    assert Ladder(layout, Kept()).rung(both, 0) is PlanName.GIVE_UP
    assert Ladder(layout, Kept(stored=True)).rung(both, 0) is PlanName.RESTORE_STORED_REPLAY


def test_the_leading_host_and_another_at_once_end_the_job() -> None:
    layout = Layout(64, 8)
    two = dict.fromkeys([*layout.on_host(0), *layout.on_host(3)], Failure.HOST)
    kept = Kept(images=True, stored=True)
    assert Ladder(layout, kept).rung(two, 64) is PlanName.GIVE_UP
    others = dict.fromkeys([*layout.on_host(2), *layout.on_host(3)], Failure.HOST)
    assert Ladder(layout, kept).rung(others, 64) is PlanName.RESTORE_SNAPSHOT_REPLAY


@pytest.mark.parametrize(
    ("gpus", "replicas", "words"), [(10, 3, "equal size"), (0, 1, "at least one"), (4, 0, "at least one")]
)
def test_an_impossible_layout_is_refused(gpus: int, replicas: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Layout(gpus, replicas)
