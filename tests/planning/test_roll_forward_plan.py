"""When a rank that died in its optimizer step is rolled forward, and with which contents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from made_up_facts import WORLD, died, having, rank, restarts

from understudy.recovery.planning.facts import (
    BufferFacts,
    CommitFacts,
    Facts,
    FaultFacts,
    Manifest,
    Phase,
    RankFacts,
)
from understudy.recovery.planning.planner import Plan, PlanName, Rewind, consistent_floor, plan
from understudy.recovery.planning.replicas import Copy

WEIGHT, BIAS, LOSS, GRADIENT = 10, 11, 12, 13
DIED = died(1)


def commit(number: int, step: int, done: int, optimizer: bool = False) -> CommitFacts:
    marks = having((*WORLD, done))
    return CommitFacts(
        number,
        step,
        **marks,
        optimizer=optimizer,
        step_digest=0 if optimizer else 7,
        index=number,
    )


COMMITS = (commit(1, 0, 1, True), commit(2, 1, 1), commit(3, 1, 2, True), commit(4, 2, 2))
"""Two steps; the gradients of the second one were reduced between commits 2 and 3."""


def content(handle: int, digest: int | None, shadowed: bool = False, size: int = 100) -> BufferFacts:
    return BufferFacts(handle, size, digest, shadowed)


def manifests(me: int) -> dict[int, Manifest]:
    """A parameter that each step changes, one that none does, a loss of its own, and a gradient."""
    return {
        2: (content(WEIGHT, 200), content(BIAS, 7)),
        3: (content(WEIGHT, 300), content(BIAS, 7), content(LOSS, 900 + me, shadowed=True),
            content(GRADIENT, 55)),
        4: (content(WEIGHT, 400), content(BIAS, 7), content(LOSS, 900 + me, shadowed=True)),
    }  # fmt: skip


def survivor(number: int = 0, **other: Any) -> RankFacts:
    """It has finished the second step."""
    facts = rank(number, commits=COMMITS, manifests=manifests(number), optimizer_preimages=False)
    return replace(facts, **other)


def dead(number: int = 1, **other: Any) -> RankFacts:
    """It has begun the second step."""
    facts = survivor(number, alive=False, commits=COMMITS[:3], phase=Phase.OPTIMIZER)
    return replace(facts, **other)


def rolled(*ranks: RankFacts, fault: FaultFacts = DIED) -> Plan:
    chosen = plan(Facts(ranks, fault))
    assert chosen.name is PlanName.ROLL_FORWARD, chosen.reason
    return chosen


def refused(*ranks: RankFacts) -> None:
    chosen = plan(Facts(ranks, DIED))
    assert chosen.name is PlanName.GIVE_UP, chosen.reason
    assert "has neither a shadow nor a replica at step 1" in chosen.reason


def with_buffers(commits: dict[int, Manifest], number: int, *more: BufferFacts) -> dict[int, Manifest]:
    return commits | {number: commits[number] + more}


def test_who_died_in_its_step_gets_the_end_of_it_from_who_finished_it() -> None:
    chosen = rolled(survivor(), dead())
    assert chosen.targets == {0: 4, 1: 3}
    assert Rewind(0, 4) in chosen.actions
    (restart,) = restarts(chosen)
    assert restart.copies == (Copy(WEIGHT, 0, WEIGHT, 100, 400), Copy(BIAS, 0, BIAS, 100, 7))
    roll = restart.roll_forward
    assert roll is not None
    assert (roll.rolled, roll.steady, roll.own, roll.lost) == ((WEIGHT,), (BIAS,), (LOSS,), (GRADIENT,))
    assert "rank 1 died, rank 1 inside an optimizer step that the others have finished" in chosen.reason


def test_a_gradient_that_the_survivor_still_has_is_copied() -> None:
    later = with_buffers(manifests(0), 4, content(99, 55))
    (restart,) = restarts(rolled(survivor(manifests=later), dead()))
    assert Copy(GRADIENT, 0, 99, 100, 55) in restart.copies
    assert restart.roll_forward is not None and restart.roll_forward.lost == ()


def test_a_rank_whose_state_is_all_shadowed_computes_its_step_again() -> None:
    shadowed = {n: tuple(b._replace(shadowed=True) for b in m) for n, m in manifests(1).items()}
    chosen = plan(Facts((survivor(), dead(manifests=shadowed)), DIED))
    assert chosen.name is PlanName.RESTART_COPY_REPLAY
    assert chosen.targets == {0: 4, 1: 3}
    assert restarts(chosen)[0].copies == ()


def test_shadowed_state_is_rolled_together_with_what_is_not() -> None:
    """One call changes many parameters: it is either run or left out."""
    both = {n: (*m, content(20, 1000 + n)) for n, m in manifests(0).items()}
    mine = {n: (*m, content(20, 1000 + n, shadowed=True)) for n, m in manifests(1).items()}
    (restart,) = restarts(rolled(survivor(manifests=both), dead(manifests=mine)))
    assert restart.roll_forward is not None and restart.roll_forward.rolled == (WEIGHT, 20)
    assert Copy(20, 0, 20, 100, 1004) in restart.copies


def test_state_that_only_replicas_at_another_content_hold_is_not_rolled() -> None:
    theirs = manifests(0) | {3: (content(WEIGHT, 301), content(BIAS, 7))}
    refused(survivor(manifests=theirs), dead())


def test_replicas_that_did_not_agree_after_the_step_before_are_not_rolled() -> None:
    """Local steps between averages: equal where the step begins, and different behind it."""
    theirs = manifests(0) | {2: (content(WEIGHT, 201), content(BIAS, 7))}
    refused(survivor(manifests=theirs), dead())


def test_buffers_that_look_alike_and_part_in_the_step_are_not_rolled() -> None:
    theirs = manifests(0)
    for number, digest in ((2, 200), (3, 300), (4, 444)):
        theirs = with_buffers(theirs, number, content(30, digest))
    refused(survivor(manifests=theirs), dead())


def test_buffers_that_look_alike_and_stay_so_are_rolled() -> None:
    both = manifests(0)
    for number, digest in ((2, 200), (3, 300), (4, 400)):
        both = with_buffers(both, number, content(30, digest))
    mine = {n: m + tuple(b for b in both[n] if b.handle == 30) for n, m in manifests(1).items()}
    (restart,) = restarts(rolled(survivor(manifests=both), dead(manifests=mine)))
    assert restart.roll_forward is not None and restart.roll_forward.rolled == (WEIGHT, 30)


def test_state_that_changed_again_behind_the_step_is_not_rolled() -> None:
    further = (*COMMITS, commit(5, 2, 2))
    later = manifests(0) | {5: (content(WEIGHT, 401), content(BIAS, 7))}
    refused(survivor(commits=further, manifests=later), dead())
    same = manifests(0) | {5: manifests(0)[4]}
    assert rolled(survivor(commits=further, manifests=same), dead()).targets == {0: 5, 1: 3}


def test_a_collective_in_the_step_bars_the_way() -> None:
    talked = (*COMMITS[:3], commit(4, 2, 3))
    chosen = plan(Facts((survivor(commits=talked), dead()), DIED))
    assert chosen.name is PlanName.GIVE_UP
    assert "share no commit" in chosen.reason


def test_a_survivor_stuck_inside_the_step_bars_the_way() -> None:
    stuck = survivor(commits=COMMITS[:3], phase=Phase.OPTIMIZER)
    chosen = plan(Facts((stuck, dead()), DIED))
    assert chosen.name is PlanName.GIVE_UP
    assert "rank 0 stood inside its optimizer step" in chosen.reason


def test_what_was_refused_once_is_not_tried_again() -> None:
    for commit_number in (3, 2):  # what is newer is not better
        chosen = plan(Facts((survivor(), dead(refused_commit=commit_number)), DIED))
        assert chosen.name is PlanName.GIVE_UP
        assert f"with what others hold rank 1 from commit {commit_number} could not go on" in chosen.reason
    rolled(survivor(), dead(refused_commit=4))


def test_without_manifests_of_the_step_before_nothing_is_rolled() -> None:
    refused(survivor(), dead(manifests={n: m for n, m in manifests(1).items() if n != 2}))
    refused(survivor(manifests={n: m for n, m in manifests(0).items() if n != 2}), dead())


def test_of_the_step_before_no_shadows_are_needed() -> None:
    """It died again while it was rolled forward: the shadows of older commits may have been overwritten."""
    void = tuple(replace(c, has_manifest=c.number > 2) for c in COMMITS[:3])
    rolled(survivor(), dead(commits=void))


def test_snapshots_come_after_rolling_forward() -> None:
    kept: dict[str, Any] = {"snapshots": (COMMITS[1],)}
    rolled(survivor(**kept), dead(**kept))
    chosen = plan(Facts((survivor(**kept), dead(refused_commit=3, **kept)), DIED))
    assert chosen.name is PlanName.RESTORE_SNAPSHOT_REPLAY
    assert chosen.targets == {0: 2, 1: 2}


def test_two_dead_ranks_are_rolled_forward_by_one_survivor() -> None:
    chosen = rolled(survivor(), dead(), dead(2), fault=died(1, 2))
    assert [(r.rank, r.roll_forward is not None) for r in restarts(chosen)] == [(1, True), (2, True)]


def test_a_rank_is_rolled_forward_by_whom_it_has_its_state_in_common_with() -> None:
    """Of two pipeline stages with two copies each only one rank holds the same."""
    other = {n: tuple(b._replace(digest=(b.digest or 0) + 5000) for b in m) for n, m in manifests(0).items()}
    chosen = rolled(survivor(0, manifests=other), dead(1), survivor(2))
    (restart,) = restarts(chosen)
    assert {copy.source for copy in restart.copies} == {2}


def test_contents_that_one_rank_holds_more_often_count_as_its_own() -> None:
    mine = with_buffers(manifests(1), 3, content(40, 55, shadowed=True))
    (restart,) = restarts(rolled(survivor(), dead(manifests=mine)))
    assert restart.roll_forward is not None and restart.roll_forward.own == (LOSS, GRADIENT, 40)


def test_floors_keep_what_rolling_a_peer_forward_needs() -> None:
    ahead, behind = survivor(floor_commit=0), dead(alive=True, floor_commit=0)
    assert consistent_floor((ahead, behind)) == {0: 2, 1: 2}
    assert consistent_floor((ahead, survivor(1, floor_commit=0))) == {0: 2, 1: 2}


def test_floors_of_ranks_that_keep_pre_images_do_not_wait() -> None:
    plain = tuple(replace(c, optimizer=False) for c in COMMITS)
    ranks = tuple(survivor(n, commits=plain, optimizer_preimages=True, floor_commit=0) for n in (0, 1))
    assert consistent_floor(ranks) == {0: 4, 1: 4}
