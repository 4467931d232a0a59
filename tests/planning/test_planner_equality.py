"""Plans are those of the planner that visited every cut, and grow with the ranks no faster than these do."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from unittest import mock

import former_planner
import pytest
from made_up_jobs import Manifests, large_job, small_job

from understudy.recovery.planning import planner
from understudy.recovery.planning.communicators import connected
from understudy.recovery.planning.cuts import CutSearch
from understudy.recovery.planning.facts import (
    BufferFacts,
    CommitFacts,
    Facts,
    FaultFacts,
    FaultKind,
    RankFacts,
)
from understudy.recovery.planning.planner import PlanName, consistent_floor, plan
from understudy.recovery.planning.restarts import Restart

MANY = int(os.environ.get("UNDERSTUDY_TEST_PLANS", "2000"))
"""Random jobs; 10,000 and more by hand."""


def test_plans_of_random_jobs_are_those_of_a_search_through_every_cut(seed: int) -> None:
    chance = random.Random(seed)
    names: Counter[PlanName] = Counter()
    for repetition in range(MANY):
        facts = small_job(chance)
        with former_planner.installed():
            expected = plan(facts)
        names[expected.name] += 1
        chosen = plan(facts)
        assert chosen == expected, f"repetition {repetition}: {facts}"
        assert {rank: commit.number for rank, commit in chosen.cut.items()} == chosen.targets
    print(names)
    assert len(names) >= len(PlanName) - 1, names  # the rarest comes up once in a thousand


def test_floors_and_connected_ranks_of_random_jobs_are_those_of_before(seed: int) -> None:
    chance = random.Random(seed)
    for repetition in range(MANY // 4):
        ranks = small_job(chance).ranks
        with former_planner.installed():
            expected = consistent_floor(ranks)
        assert consistent_floor(ranks) == expected, f"repetition {repetition}: {ranks}"
        start = [chance.randrange(6) for _ in range(chance.randint(1, 2))]
        assert connected(ranks, start) == former_planner.connected(ranks, start), f"{start}: {ranks}"


@pytest.mark.parametrize(
    "facts",
    [
        large_job(256, (7,)),
        large_job(256, (7,), alone=(7,)),
        large_job(256, (7, 8, 9), alone=(8,), behind=(9,)),
        large_job(256, tuple(range(64, 128))),
        large_job(64, (3,), sharded=True, snapshots=True),
        large_job(64, (3,), sharded=True),
    ],
    ids=["one", "one alone", "three", "a replica", "sharded, a snapshot", "sharded"],
)
def test_plans_of_larger_jobs_are_those_of_before(facts: Facts) -> None:
    with former_planner.installed():
        expected = plan(facts)
    assert plan(facts) == expected


def test_a_cut_among_tens_of_thousands_is_found() -> None:
    """Every rank but one may be one commit further back or not, and all have to be."""
    commits = tuple(CommitFacts(n, 1, uids=((1, 1),), sequences=(5,), members=(16,), index=n) for n in (1, 2))
    wanted = tuple(BufferFacts(10 + n, 8, 100 + n, False) for n in range(1, 16))
    dead = RankFacts(
        0, alive=False, commits=commits[:1], manifests={1: wanted}, log_complete_from_start=False
    )
    others = [
        RankFacts(
            n, commits=commits, log_complete_from_start=False,
            manifests={1: (BufferFacts(10, 8, 100 + n, False),), 2: (BufferFacts(10, 8, 999, False),)},
        )
        for n in range(1, 16)
    ]  # fmt: skip
    facts = Facts((dead, *others), FaultFacts(FaultKind.SERVER_DIED, (0,)))
    with former_planner.installed():
        assert plan(facts).name is PlanName.GIVE_UP
    chosen = plan(facts)
    assert chosen.name is PlanName.RESTART_COPY_REPLAY
    (restart,) = (action for action in chosen.actions if isinstance(action, Restart))
    assert [copy.source for copy in restart.copies] == list(range(1, 16))


LOST = ["one", "one alone", "one in a hundred"]


def job_with(lost: str, world: int) -> Facts:
    dead = tuple(range(0, world, 100)) if lost == "one in a hundred" else (world // 2,)
    return large_job(world, dead, alone=dead if lost == "one alone" else (), buffers=20)


@pytest.mark.parametrize("lost", LOST)
def test_each_rank_is_looked_at_a_few_times_and_its_manifest_read_once_or_twice(lost: str) -> None:
    world = 1024
    facts = job_with(lost, world)
    with (
        mock.patch.object(CutSearch, "_at", autospec=True, side_effect=CutSearch._at) as at,
        mock.patch.object(Manifests, "__getitem__", autospec=True, side_effect=Manifests.__getitem__) as read,
    ):
        plan(facts)
    print(at.call_count, read.call_count)
    assert at.call_count <= 4 * world
    assert read.call_count <= 2 * world


@pytest.mark.parametrize("lost", LOST)
def test_four_times_the_ranks_take_about_four_times_as_long(lost: str) -> None:
    """It was sixteen times and more; the least of six, as others may want the processor, and its caches."""

    def seconds(world: int) -> float:
        facts = job_with(lost, world)
        spent = []
        for _ in range(6):
            begun = time.process_time()
            planner.plan(facts)
            spent.append(time.process_time() - begun)
        return min(spent)

    few, many = seconds(1024), seconds(4096)
    print(f"{few:.3f} s, {many:.3f} s")
    assert many < 9 * few
