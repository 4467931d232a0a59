"""Plans that take state from snapshots, in memory or on storage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from made_up_facts import WORLD, commit, died, having, lost_ranks, parameters, rank, restarts

from understudy.recovery.planning.facts import (
    CommitFacts,
    Facts,
    FaultFacts,
    FaultKind,
    Phase,
    RankFacts,
)
from understudy.recovery.planning.planner import (
    PlanName,
    Reload,
    plan,
)


def test_ranks_that_died_together_come_back_from_their_snapshots() -> None:
    both = tuple(rank(n, 9, alive=False, snapshots=(commit(2), commit(5))) for n in (0, 1))
    chosen = plan(Facts(both, died(0, 1)))
    assert chosen.name is PlanName.RESTORE_SNAPSHOT_REPLAY
    assert chosen.actions == (Reload(0, 5, fresh=True), Reload(1, 5, fresh=True))
    assert "the device servers of ranks 0, 1 are gone, and only" in chosen.reason


def test_of_a_server_that_runs_and_has_no_way_back_nobody_says_that_it_is_gone() -> None:
    struck, inside = (rank(n, 9, alive=False, snapshots=(commit(5),)) for n in (0, 1))
    chosen = plan(Facts((struck, replace(inside, sealed=True)), died(0)))
    assert chosen.name is PlanName.RESTORE_SNAPSHOT_REPLAY
    assert "the device servers of ranks 0 are gone, rank 1 stood inside its optimizer step" in chosen.reason


def test_snapshot_that_only_one_rank_completed_is_not_used() -> None:
    ranks = (
        rank(0, 9, alive=False, snapshots=(commit(2), commit(5))),
        rank(1, 9, alive=False, snapshots=(commit(2),)),
    )
    assert plan(Facts(ranks, died(0, 1))).targets == {0: 2, 1: 2}


def test_survivor_whose_peer_has_no_replica_goes_back_to_its_snapshot_on_its_own_server() -> None:
    private = {n: parameters(7 + n) for n in range(1, 10)}
    ranks = (
        rank(0, 9, floor_commit=8, snapshots=(commit(4),)),
        rank(1, 9, alive=False, manifests=private, floor_commit=8, snapshots=(commit(4),)),
    )
    chosen = plan(Facts(ranks, died(1)))
    assert chosen.name is PlanName.RESTORE_SNAPSHOT_REPLAY
    assert chosen.actions == (Reload(0, 4, fresh=False), Reload(1, 4, fresh=True))


def test_state_that_is_not_reached_comes_from_another_replica_then_from_a_snapshot_or_is_tried_again() -> (
    None
):
    snapshots = (commit(2),)
    dead = rank(0, alive=False, unread=frozenset({1}), snapshots=snapshots)
    other = rank(1, snapshots=snapshots)
    (restart,) = restarts(plan(Facts((dead, other, rank(2)), died(0))))
    assert {copy.source for copy in restart.copies} == {2}
    chosen = plan(Facts((dead, other), died(0)))
    assert chosen.name is PlanName.RESTORE_SNAPSHOT_REPLAY
    assert "rank 0 does not reach the state of rank 1 (buffers without another: 1)" in chosen.reason
    nothing_else = Facts((replace(dead, snapshots=()), other), died(0))
    reached = Facts((replace(dead, snapshots=(), unread=frozenset()), other), died(0))
    assert plan(nothing_else) == plan(reached) and plan(reached).name is PlanName.RESTART_COPY_REPLAY


def test_snapshots_are_left_alone_where_a_replica_will_do() -> None:
    ranks = (rank(0, snapshots=(commit(3),)), rank(1, alive=False, snapshots=(commit(3),)))
    assert plan(Facts(ranks, died(1))).name is PlanName.RESTART_COPY_REPLAY


def test_survivor_stuck_in_its_optimizer_step_without_pre_images_goes_back_to_a_snapshot() -> None:
    stuck: dict[str, Any] = {"phase": Phase.OPTIMIZER, "optimizer_preimages": False}
    ranks = (rank(0, snapshots=(commit(2),), **stuck), rank(1, alive=False, snapshots=(commit(2),), **stuck))
    chosen = plan(Facts(ranks, died(1)))
    assert chosen.actions == (Reload(0, 2, fresh=False), Reload(1, 2, fresh=True))


def test_single_rank_comes_back_from_its_snapshot_though_its_log_is_complete() -> None:
    alone = RankFacts(
        0, alive=False, protected=False, commits=(commit(7, complete=False),), snapshots=(commit(6),)
    )
    assert plan(Facts((alone,), died(0))).actions == (Reload(0, 6, fresh=True),)


def test_ranks_whose_snapshots_have_left_memory_come_back_from_storage_on_new_servers() -> None:
    stuck: dict[str, Any] = {"phase": Phase.OPTIMIZER, "optimizer_preimages": False}
    ranks = (rank(0, 9, stored=(commit(5),), **stuck), rank(1, 9, alive=False, stored=(commit(5),), **stuck))
    chosen = plan(Facts(ranks, died(1)))
    assert chosen.name is PlanName.RESTORE_STORED_REPLAY
    assert chosen.actions == (Reload(0, 5, True, stored=True), Reload(1, 5, True, stored=True))
    assert "rank 0 at commit 5 on storage" in chosen.reason


def test_who_stays_when_others_are_given_up_may_come_from_storage_too() -> None:
    stuck: dict[str, Any] = {"phase": Phase.OPTIMIZER, "optimizer_preimages": False}
    marks = commit(5, **having((5, 5, 1)))
    apart = rank(2, 9, commits=(commit(9, **having((5, 5, 1))),), stored=(marks,), **stuck)
    chosen = plan(Facts((rank(0), rank(1), apart), died(1, attempts=3)))
    assert lost_ranks(chosen) == [0, 1]
    assert Reload(2, 5, True, stored=True) in chosen.actions
    assert chosen.cut == {2: marks}


def test_memory_is_preferred_to_storage_and_an_older_set_on_storage_to_none() -> None:
    both = tuple(
        rank(n, 9, alive=False, snapshots=(commit(5),), stored=(commit(2), commit(5))) for n in (0, 1)
    )
    assert plan(Facts(both, died(0, 1))).actions == (Reload(0, 5, fresh=True), Reload(1, 5, fresh=True))
    one_gone = (both[0], replace(both[1], snapshots=(), stored=(commit(2),)))
    assert plan(Facts(one_gone, died(0, 1))).actions == (
        Reload(0, 2, True, stored=True), Reload(1, 2, True, stored=True)
    )  # fmt: skip


def test_snapshot_that_a_server_found_damaged_comes_from_storage_or_is_tried_again() -> None:
    refused: dict[str, Any] = {
        "alive": False, "snapshots": (commit(5),), "refused_snapshots": frozenset({(5, 5)})
    }  # fmt: skip
    ranks = (rank(0, 9, **refused), rank(1, 9, alive=False, snapshots=(commit(5),)))
    assert plan(Facts(ranks, died(0, 1))).targets == {0: 5, 1: 5}
    stored = (replace(ranks[0], stored=(commit(5),)), ranks[1])
    assert plan(Facts(stored, died(0, 1))).actions == (
        Reload(0, 5, True, stored=True), Reload(1, 5, fresh=True)
    )  # fmt: skip


def test_job_that_is_given_up_because_storage_was_of_no_use_says_so() -> None:
    gone = rank(0, 9, alive=False, commits=())
    chosen = plan(Facts((gone,), died(0), storage_problem="snapshot 4 does not come back"))
    assert chosen.name is PlanName.GIVE_UP
    assert chosen.reason.endswith("; snapshot 4 does not come back")


def test_rehearsal_takes_all_ranks_from_storage_though_nothing_is_broken() -> None:
    rehearsal = FaultFacts(FaultKind.REHEARSAL, (0,))
    sound = tuple(rank(n, 9, snapshots=(commit(5),), stored=(commit(4),)) for n in (0, 1))
    chosen = plan(Facts(sound, rehearsal))
    assert chosen.actions == (Reload(0, 4, True, stored=True), Reload(1, 4, True, stored=True))
    without = tuple(replace(one, stored=()) for one in sound)
    assert plan(Facts(without, rehearsal)).name is PlanName.REWIND_IN_PLACE


def test_destroyed_communicator_is_known_from_a_snapshot_that_the_ring_has_forgotten() -> None:
    before = CommitFacts(2, 2, index=2, **having((*WORLD, 5)))
    after = CommitFacts(70, 70, index=70)
    ranks = tuple(
        RankFacts(n, alive=False, log_complete_from_start=False, floor_commit=70, commits=(after,),
                  snapshots=(before, replace(after, number=60)) if n else (before,))
        for n in (0, 1)
    )  # fmt: skip
    assert plan(Facts(ranks, died(0, 1))).targets == {0: 2, 1: 2}


def test_peers_of_a_rank_that_left_while_it_was_recovered_are_given_up() -> None:
    chosen = plan(Facts((rank(0), rank(2)), died(1), departed=(1,)))
    assert lost_ranks(chosen) == [0, 2]


def replayed(number: int, **other: Any) -> RankFacts:
    """A rank that commits twice as often as the run before did, whose commit 3 is now its commit 6.

    It has given a communicator up on the way, so that what it had done is looked up for all of its commits.
    """
    gone = (9, 9, 1)
    commits = tuple(
        commit(n, n, index=10 * n, **having((*WORLD, n), *([gone] if n < 3 else ()))) for n in range(1, 9)
    )
    return replace(
        RankFacts(number, commits=commits, log_complete_from_start=False, floor_commit=4, alive=False),
        **other,
    )


@pytest.mark.parametrize("kept", ["snapshots", "stored"])
def test_a_snapshot_from_before_a_recovery_is_no_commit_that_now_has_its_number(kept: str) -> None:
    before = commit(3, 6, index=60)  # made while commits were rare: six collectives were done
    now = {number: commit(number, number, index=10 * number) for number in (3, 6)}
    for other, expected in ((now[6], 6), (now[3], None)):
        ranks = (replayed(0, **{kept: (before,)}), replayed(1, **{kept: (other,)}))
        chosen = plan(Facts(ranks, died(0, 1)))
        assert (chosen.targets if expected else chosen.name) == (
            {0: 3, 1: expected} if expected else PlanName.GIVE_UP
        ), f"with commit {other.number} of the other rank: {chosen.reason}"


def test_a_snapshot_whose_number_is_ahead_of_a_rank_that_commits_less_often_now_still_counts() -> None:
    commits = tuple(commit(n, 2 * n, index=20 * n) for n in (1, 2, 3))
    lost = RankFacts(0, commits=commits, log_complete_from_start=False, floor_commit=3, alive=False)
    of = {number: (commit(number, number, index=10 * number),) for number in (4, 7)}
    ranks = tuple(replace(lost, rank=rank, snapshots=of[4]) for rank in (0, 1))
    assert plan(Facts(ranks, died(0, 1))).targets == {0: 4, 1: 4}
    ahead = tuple(replace(one, snapshots=of[7]) for one in ranks)
    assert plan(Facts(ahead, died(0, 1))).name is PlanName.GIVE_UP
