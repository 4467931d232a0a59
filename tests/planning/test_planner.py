"""The decision what to do after a fault, case by case."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from made_up_facts import commit, died, having, lost_ranks, parameters, rank, restarts

from understudy.recovery.base.naming_ranks import named, placed
from understudy.recovery.planning.facts import (
    BufferFacts,
    CommitFacts,
    Facts,
    FaultFacts,
    FaultKind,
    Phase,
    RankFacts,
)
from understudy.recovery.planning.planner import (
    FailRank,
    PlanName,
    Reload,
    Rewind,
    parked_anywhere,
    plan,
)


# ------------------------------------------------------------------ the ladder
def test_dead_server_is_restarted_from_the_replica_and_survivors_rewind() -> None:
    chosen = plan(Facts((rank(0), rank(1, alive=False)), died(1)))
    assert chosen.name is PlanName.RESTART_COPY_REPLAY
    assert chosen.targets == {0: 3, 1: 3}
    assert Rewind(0, 3) in chosen.actions
    (restart,) = restarts(chosen)
    assert [(copy.source, copy.handle, copy.source_handle) for copy in restart.copies] == [(0, 10, 10)]
    assert "rank 1 died" in chosen.reason


def test_survivor_that_is_ahead_goes_back_to_the_commit_of_the_dead_rank() -> None:
    chosen = plan(Facts((rank(0, 4), rank(1, 3, alive=False)), died(1)))
    assert chosen.targets == {0: 3, 1: 3}


def test_failed_collective_is_rewound_in_place_on_every_rank() -> None:
    chosen = plan(Facts((rank(0, 4), rank(1, 3)), FaultFacts(FaultKind.COLLECTIVE_FAILED, (0,))))
    assert chosen.name is PlanName.REWIND_IN_PLACE
    assert chosen.targets == {0: 3, 1: 3}


def test_a_call_that_failed_once_is_rewound_in_place() -> None:
    chosen = plan(Facts((rank(0), rank(1)), FaultFacts(FaultKind.CALL_FAILED, (1,), message="driver error")))
    assert chosen.name is PlanName.REWIND_IN_PLACE
    assert "a call failed for the first time" in chosen.reason


def test_a_suspect_server_is_left_for_another_one_with_its_own_state() -> None:
    facts = Facts((rank(0), rank(1, suspect=True)), FaultFacts(FaultKind.DRIVER_SUSPECT, (1,)))
    chosen = plan(facts)
    assert chosen.name is PlanName.STASH_RESTART_RESTORE
    (restart,) = restarts(chosen)
    assert restart.keeps_source and [copy.source for copy in restart.copies] == [1]
    assert chosen.targets == {0: 3, 1: 3}


def test_a_suspect_server_needs_no_replica() -> None:
    alone = rank(1, suspect=True, manifests={n: parameters(7) for n in (1, 2, 3)})
    chosen = plan(Facts((rank(0), alone), FaultFacts(FaultKind.DRIVER_SUSPECT, (1,))))
    assert chosen.name is PlanName.STASH_RESTART_RESTORE


def test_a_suspect_server_beside_a_dead_one_gives_its_state_to_both() -> None:
    facts = Facts((rank(0, alive=False), rank(1, suspect=True)), died(0))
    chosen = plan(facts)
    assert chosen.name is PlanName.RESTART_COPY_REPLAY
    assert [(r.rank, r.keeps_source, [c.source for c in r.copies]) for r in restarts(chosen)] == [
        (0, False, [1]), (1, True, [1])
    ]  # fmt: skip


def test_a_failed_call_that_cannot_be_undone_is_raised_with_its_own_words() -> None:
    stuck = rank(1, optimizer_preimages=False, phase=Phase.OPTIMIZER)
    chosen = plan(Facts((rank(0), stuck), FaultFacts(FaultKind.CALL_FAILED, (1,), message="misaligned")))
    assert chosen.name is PlanName.GIVE_UP
    assert chosen.reason.startswith("misaligned; it could not be recovered from: rank 1 stood inside")


def test_a_rank_without_a_device_needs_a_free_one() -> None:
    gone = FaultFacts(FaultKind.DEVICE_GONE, (1,), message="it fell off the bus")
    facts = Facts((rank(0), rank(1, alive=False)), gone, homeless=(1,))
    chosen = plan(facts)
    assert chosen.name is PlanName.GIVE_UP
    assert "the device of rank 1 is gone (it fell off the bus), and no other is free" in chosen.reason
    chosen = plan(replace(facts, free_devices=1))
    assert chosen.name is PlanName.RESTART_COPY_REPLAY
    assert "lost its device" in chosen.reason


def test_dead_rank_with_everything_shadowed_needs_no_replica() -> None:
    alone = rank(1, alive=False, manifests={n: parameters(7, 8, shadowed=True) for n in (1, 2, 3)})
    chosen = plan(Facts((rank(0), alone), died(1)))
    assert chosen.targets == {0: 3, 1: 3}
    assert restarts(chosen)[0].copies == ()


def test_dead_rank_before_its_first_commit_starts_again_at_the_beginning_with_everybody() -> None:
    start: dict[str, Any] = {"commits": (), "manifests": {}, "floor_commit": 0}
    start["log_complete_from_start"] = True
    ahead = rank(0, 1, log_complete_from_start=True, floor_commit=0)
    chosen = plan(Facts((ahead, rank(1, alive=False, **start)), died(1)))
    assert chosen.targets == {0: 0, 1: 0}


def test_single_rank_whose_log_is_complete_replays_from_the_beginning() -> None:
    alone = RankFacts(
        0, alive=False, commits=(CommitFacts(1, 1, complete=False, has_manifest=False, index=1),)
    )
    assert plan(Facts((alone,), died(0))).targets == {0: 0}


def test_single_rank_whose_log_was_released_is_given_up_with_the_reason() -> None:
    alone = RankFacts(0, alive=False, log_complete_from_start=False)
    chosen = plan(Facts((alone,), died(0)))
    assert chosen.name is PlanName.GIVE_UP
    assert "no other rank holds its state" in chosen.reason
    assert lost_ranks(chosen) == [0]


def test_buffer_without_replica_at_the_newest_cut_is_found_at_an_older_one() -> None:
    private = {3: parameters(1003, 555), 2: parameters(1002), 1: parameters(1001)}
    chosen = plan(Facts((rank(0), rank(1, alive=False, manifests=private)), died(1)))
    assert chosen.targets == {0: 2, 1: 2}


def test_buffer_without_any_replica_is_named_with_its_size() -> None:
    private = {n: (*parameters(1000 + n), BufferFacts(77, 4096, 5, False)) for n in (1, 2, 3)}
    chosen = plan(Facts((rank(0), rank(1, alive=False, manifests=private)), died(1)))
    assert chosen.name is PlanName.GIVE_UP
    assert "handle 77, 4096 bytes" in chosen.reason
    assert lost_ranks(chosen) == [0, 1]


def test_equal_bytes_at_a_different_step_are_no_replica() -> None:
    other = tuple(commit(n, step=n + 1) for n in (1, 2, 3))
    chosen = plan(Facts((rank(0, commits=other), rank(1, alive=False)), died(1)))
    assert chosen.name is PlanName.GIVE_UP


def test_every_replica_dead_is_given_up_in_those_words() -> None:
    chosen = plan(Facts((rank(0, alive=False), rank(1, alive=False)), died(0, 1)))
    assert chosen.name is PlanName.GIVE_UP
    assert "every replica died" in chosen.reason


def test_two_dead_ranks_are_both_restored_from_the_third() -> None:
    chosen = plan(Facts((rank(0, alive=False), rank(1), rank(2, alive=False)), died(0, 2)))
    assert [(r.rank, r.copies[0].source) for r in restarts(chosen)] == [(0, 1), (2, 1)]


def test_incomplete_commit_of_the_dead_rank_is_passed_over() -> None:
    commits = (commit(1), commit(2), commit(3, complete=False))
    chosen = plan(Facts((rank(0), rank(1, alive=False, commits=commits)), died(1)))
    assert chosen.targets == {0: 2, 1: 2}


def test_manifest_that_cannot_be_read_counts_as_no_state() -> None:
    chosen = plan(Facts((rank(0), rank(1, alive=False, manifests={2: parameters(1002)})), died(1)))
    assert chosen.targets == {0: 2, 1: 2}


def test_nobody_goes_below_the_floor() -> None:
    chosen = plan(Facts((rank(0, 4, floor_commit=4), rank(1, 3, alive=False)), died(1)))
    assert chosen.name is PlanName.GIVE_UP


def test_record_that_failed_three_times_raises_its_own_message_everywhere() -> None:
    fault = FaultFacts(FaultKind.COLLECTIVE_FAILED, (1,), attempts=3, message="NaN in the link")
    chosen = plan(Facts((rank(0), rank(1)), fault))
    assert chosen.actions == (FailRank(0, "NaN in the link"), FailRank(1, "NaN in the link"))


def test_parked_ranks_without_a_common_communicator_are_not_given_up_but_rewound() -> None:
    apart = rank(2, commits=(CommitFacts(1, 1, index=1, **having((5, 5, 1))),), manifests={})
    chosen = plan(Facts((rank(0), rank(1), apart), died(1, attempts=3)))
    assert lost_ranks(chosen) == [0, 1]
    assert Rewind(2, 1) in chosen.actions


def test_ranks_whose_communicators_are_not_known_yet_are_given_up_together() -> None:
    young = [RankFacts(number) for number in range(3)]
    chosen = plan(Facts(tuple(young), died(1, attempts=3)))
    assert lost_ranks(chosen) == [0, 1, 2]


def test_rank_inside_the_optimizer_without_preimages_is_given_up_by_name() -> None:
    stuck = rank(0, optimizer_preimages=False, phase=Phase.OPTIMIZER)
    chosen = plan(Facts((stuck, rank(1, alive=False)), died(1)))
    assert chosen.name is PlanName.GIVE_UP
    assert "rank 0 stood inside its optimizer step" in chosen.reason


def test_rank_without_optimizer_preimages_reaches_only_its_newest_commit() -> None:
    ahead = rank(0, 4, optimizer_preimages=False)
    assert plan(Facts((ahead, rank(1, 3, alive=False)), died(1))).name is PlanName.GIVE_UP
    level = rank(0, 3, optimizer_preimages=False)
    assert plan(Facts((level, rank(1, 3, alive=False)), died(1))).targets == {0: 3, 1: 3}


def test_rank_whose_peer_has_left_is_given_up() -> None:
    chosen = plan(Facts((rank(1, alive=False),), died(1), departed=(0,)))
    assert chosen.name is PlanName.GIVE_UP
    assert "worker of rank 0 has ended" in chosen.reason


def test_rank_that_waits_for_a_peer_whose_program_has_ended_is_no_fault_of_ours() -> None:
    """A worker that failed by itself was told as a recovery that was given up, and rang an alarm."""
    fault = FaultFacts(FaultKind.COLLECTIVE_FAILED, (1,), message="closed by peer")
    chosen = plan(Facts((rank(1),), fault, departed=(0,)))
    assert chosen.name is PlanName.END_WITH_PEER
    assert [type(action) for action in chosen.actions] == [FailRank]
    assert "worker of rank 0 has ended" in chosen.reason


def test_rank_that_met_a_peer_for_the_first_time_since_its_commit_is_given_up_if_that_has_left() -> None:
    """A barrier at the end of programs that had no other collective: nobody takes part in it again."""
    known = (replace(commit(4), **having()),)
    alone = rank(1, alive=False, commits=known, snapshots=known)
    assert plan(Facts((alone,), died(1), departed=(0,))).name is not PlanName.GIVE_UP
    chosen = plan(Facts((replace(alone, begun=(((9, 0), 2),)),), died(1), departed=(0,)))
    assert chosen.name is PlanName.GIVE_UP
    assert "worker of rank 0 has ended" in chosen.reason


# ------------------------------------------------------------------ corruption, and what does not replay
def test_corruption_goes_back_to_the_newest_trusted_commit_even_though_newer_ones_exist() -> None:
    fault = FaultFacts(FaultKind.SILENT_CORRUPTION, (1,), message="replicas differ", trusted={0: 2, 1: 2})
    chosen = plan(Facts((rank(0), rank(1)), fault))
    assert chosen.name is PlanName.REWIND_IN_PLACE
    assert chosen.targets == {0: 2, 1: 2}
    assert chosen.reason.startswith("replicas differ")


def test_corruption_that_cannot_be_undone_ends_no_training_but_goes_on_from_the_newest_cut() -> None:
    fault = FaultFacts(FaultKind.SILENT_CORRUPTION, (1,), message="replicas differ", trusted={0: 0, 1: 0})
    chosen = plan(Facts((rank(0), rank(1)), fault))
    assert chosen.name is PlanName.REWIND_IN_PLACE
    assert chosen.targets == {0: 3, 1: 3}


def test_a_rank_whose_memory_was_corrupted_is_restored_from_its_replica_at_the_trusted_commit() -> None:
    fault = FaultFacts(FaultKind.SILENT_CORRUPTION, (1,), message="replicas differ", trusted={0: 2, 1: 2})
    chosen = plan(Facts((rank(0), rank(1, alive=False)), fault))
    assert chosen.name is PlanName.RESTART_COPY_REPLAY
    assert chosen.targets == {0: 2, 1: 2}


def test_a_job_that_does_not_replay_is_given_up_with_where_it_differed() -> None:
    facts = Facts((rank(0, alive=False), rank(1)), died(0), not_replayable="buffer 3 after record 17")
    chosen = plan(facts)
    assert chosen.name is PlanName.GIVE_UP
    assert lost_ranks(chosen) == [0, 1]
    assert "buffer 3 after record 17" in chosen.reason


def test_nothing_is_recovered_where_the_workers_of_all_ranks_have_ended_meanwhile() -> None:
    """An error of one rank's program, and the end of the other by its launcher, were told as a recovery."""
    chosen = plan(
        Facts((), FaultFacts(FaultKind.COLLECTIVE_FAILED, (0,), message="closed by peer"), departed=(1,))
    )
    assert (chosen.name, chosen.actions) == (PlanName.END_WITH_PEER, ())
    assert "have ended" in chosen.reason


def test_a_plan_for_ranks_that_still_run_does_not_count_on_where_they_are() -> None:
    """Once they are parked, they may stand in an optimizer step that keeps no pre-images."""
    fault = FaultFacts(FaultKind.SILENT_CORRUPTION, (1,), message="replicas differ", trusted={0: 3, 1: 3})
    facts = Facts(tuple(rank(n, optimizer_preimages=False) for n in (0, 1)), fault)
    assert plan(facts).name is PlanName.REWIND_IN_PLACE
    assert plan(parked_anywhere(facts)).name is PlanName.GIVE_UP
    undoable = Facts((rank(0), rank(1)), fault)
    assert plan(parked_anywhere(undoable)).name is PlanName.REWIND_IN_PLACE


# ------------------------------------------------------------------ moves that somebody wishes
MOVE = FaultFacts(FaultKind.PLANNED_MOVE, (1,))


def test_a_rank_that_is_to_leave_takes_its_state_along_and_needs_no_free_device() -> None:
    leaving = rank(1, leaving=True, manifests={n: parameters(7) for n in (1, 2, 3)})
    chosen = plan(Facts((rank(0), leaving), MOVE, free_devices=0))
    assert (chosen.name, chosen.replaced) == (PlanName.STASH_RESTART_RESTORE, {1})
    (restart,) = restarts(chosen)
    assert restart.keeps_source and [copy.source for copy in restart.copies] == [1]
    assert "the device server of rank 1 is left for one on another device" in chosen.reason


def test_a_rank_that_has_no_way_out_stays_and_no_job_is_given_up_for_it() -> None:
    unread = rank(1, leaving=True, manifests={})
    chosen = plan(Facts((rank(0), unread), MOVE))
    assert (chosen.name, chosen.replaced) == (PlanName.REWIND_IN_PLACE, frozenset())
    assert "rank 1 could not be moved: what rank 1 saved at commit 3 cannot be read" in chosen.reason


def test_a_rank_that_is_alone_leaves_by_its_snapshot() -> None:
    alone = rank(0, 9, leaving=True, protected=False, snapshots=(commit(8),))
    chosen = plan(Facts((alone,), replace(MOVE, ranks=(0,))))
    assert chosen.actions == (Reload(0, 8, fresh=True),)


def test_a_rank_that_dies_while_another_leaves_is_rebuilt_from_it() -> None:
    chosen = plan(Facts((rank(0, alive=False), rank(1, leaving=True)), MOVE))
    assert chosen.replaced == {0, 1}
    assert [(r.rank, r.keeps_source, [c.source for c in r.copies]) for r in restarts(chosen)] == [
        (0, False, [1]), (1, True, [1])
    ]  # fmt: skip
    assert "rank 0 died; the device server of rank 1 is left for one" in chosen.reason


def test_ranks_are_named_one_by_one_where_they_are_few_and_by_ranges_in_large_jobs() -> None:
    assert named([0, 5, 2]) == "0, 5, 2" and named([]) == ""
    assert named(range(8)) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert named([*range(1024), 2000]) == "0-1023, 2000"
    assert named([9, 8, 7, 5, 3, 2, 1, 0, 11, 11]) == "0-3, 5, 7-9, 11"
    assert placed({1: "at commit 4", 0: "at commit 5"}) == "rank 0 at commit 5, rank 1 at commit 4"
    many = {rank: "at commit 4" if rank == 7 else "at commit 5" for rank in range(1024)}
    assert placed(many) == "rank 0-6, 8-1023 at commit 5, rank 7 at commit 4"


def test_ranks_that_come_back_together_read_from_different_holders() -> None:
    """And not all from the lowest one."""
    dead = range(3)
    ranks = tuple(rank(number, alive=number not in dead) for number in range(7))
    chosen = plan(Facts(ranks, died(*dead)))
    assert [{copy.source for copy in one.copies} for one in restarts(chosen)] == [{3}, {4}, {5}]


def test_more_readers_than_holders_take_turns() -> None:
    ranks = tuple(rank(number, alive=number >= 5) for number in range(7))
    chosen = plan(Facts(ranks, died(*range(5))))
    assert [copy.source for one in restarts(chosen) for copy in one.copies] == [5, 6, 5, 6, 5]


def test_a_holder_on_the_same_host_is_read_before_others() -> None:
    hosts = ["a", "b", "a", "b", "b"]
    ranks = tuple(rank(number, alive=number not in (1, 2), host=host) for number, host in enumerate(hosts))
    chosen = plan(Facts(ranks, died(1, 2)))
    assert {one.rank: {copy.source for copy in one.copies} for one in restarts(chosen)} == {1: {3}, 2: {0}}
