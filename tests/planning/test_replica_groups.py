"""State that should equal its replicas and does not: when that is corruption, and who is suspected."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from understudy.recovery.planning.facts import BufferFacts, Manifest
from understudy.recovery.planning.replicas import AGREED_CHANGES, Deviation, ReplicaGroups
from understudy.replay import digest

WEIGHT, BIAS, PRIVATE = 10, 11, 12


def manifest(**digests: int) -> Manifest:
    handles = {"weight": WEIGHT, "bias": BIAS, "private": PRIVATE}
    return tuple(BufferFacts(handles[name], 64, digest, False) for name, digest in digests.items())


def learnt(ranks: int, rounds: int = AGREED_CHANGES + 1) -> ReplicaGroups:
    """Weights and biases that change and agree in every round, and something private."""
    groups = ReplicaGroups()
    for turn in range(rounds):
        groups.learn(
            {
                rank: manifest(weight=100 + turn, bias=200 + turn, private=1000 * rank + turn)
                for rank in range(ranks)
            },
            at_the_end_of_a_step(ranks),
        )
    return groups


def at_the_end_of_a_step(ranks: int) -> dict[int, tuple[int, int]]:
    return dict.fromkeys(range(ranks), (7, 0))


def deviations(
    groups: ReplicaGroups,
    manifests: Mapping[int, Manifest],
    points: Mapping[int, tuple[int, int]] | None = None,
) -> list[Deviation]:
    def read(rank: int, handles: list[int]) -> list[int | None]:
        known = {buffer.handle: buffer.digest for buffer in manifests[rank]}
        return [known.get(handle) for handle in handles]

    return groups.deviations(read, points or at_the_end_of_a_step(len(manifests)))


def test_replicas_that_change_alike_are_groups_and_private_state_is_none() -> None:
    groups = learnt(3)
    assert len(groups) == 2
    assert not deviations(groups, {rank: manifest(weight=7, bias=8, private=rank) for rank in range(3)})


@pytest.mark.parametrize("rounds", range(1, AGREED_CHANGES + 1))
def test_equal_content_that_has_not_changed_often_enough_may_be_chance(rounds: int) -> None:
    assert len(learnt(2, rounds)) == 0


ROUND = at_the_end_of_a_step(2)
ZEROS = digest(bytes(64))


def test_a_group_that_agreed_but_once_and_whose_members_all_changed_apart_is_told_of() -> None:
    """Whatever is replicated is written by all; a bit that changes in a job's second step is noticed."""
    groups = learnt(2, 1)
    apart = {rank: manifest(weight=101, bias=201 + rank, private=rank) for rank in range(2)}
    assert not deviations(groups, apart)
    groups.learn(apart, ROUND)
    assert [deviation.group for deviation in deviations(groups, apart)] == [((0, BIAS), (1, BIAS))]


@pytest.mark.parametrize(("before", "after"), [(200, (200, 201)), (ZEROS, (201, 202))])
def test_equal_content_that_one_rank_alone_changes_or_that_was_zero_was_chance(
    before: int, after: tuple[int, int]
) -> None:
    groups = ReplicaGroups()
    groups.learn({rank: manifest(bias=before) for rank in range(2)}, ROUND)
    for _ in range(2):
        groups.learn({rank: manifest(bias=after[rank]) for rank in range(2)}, ROUND)
        assert not deviations(groups, {rank: manifest(bias=after[rank]) for rank in range(2)})


def test_counters_that_happen_to_be_equal_once_and_are_not_afterwards_were_equal_by_chance() -> None:
    """Both ranks of examples/digits_convnet.py had as many digits right at one commit."""
    groups = ReplicaGroups()
    for counts in ((0, 0), (9, 9), (31, 28), (60, 57)):
        held = {rank: (BufferFacts(BIAS, 8, digest(bytes([count])), False),)
                for rank, count in enumerate(counts)}  # fmt: skip
        assert not deviations(groups, held)
        groups.learn(held, ROUND)


def test_nothing_is_forgotten_where_a_rank_came_back_from_a_snapshot_and_has_no_manifest_yet() -> None:
    groups = learnt(2)
    groups.learn({0: manifest(weight=300, bias=301), 1: ()}, ROUND)
    assert [deviation.group for deviation in deviations(
        groups, {0: manifest(weight=7, bias=8), 1: manifest(weight=6, bias=8)}
    )] == [((0, WEIGHT), (1, WEIGHT))]  # fmt: skip


def test_a_group_that_parts_while_it_is_learnt_from_stays_one() -> None:
    groups, apart = learnt(2), {0: manifest(weight=7, bias=8), 1: manifest(weight=6, bias=8)}
    for _ in range(3):
        groups.learn(apart, ROUND)
    assert len(deviations(groups, apart)) == 1


def test_constant_content_never_becomes_a_group() -> None:
    groups = ReplicaGroups()
    for _ in range(10):
        groups.learn({rank: manifest(weight=5) for rank in range(2)}, at_the_end_of_a_step(2))
    assert len(groups) == 0


def test_content_that_a_rank_holds_twice_names_no_pair() -> None:
    groups = ReplicaGroups()
    for turn in range(10):
        groups.learn({rank: manifest(weight=turn, bias=turn) for rank in range(2)}, at_the_end_of_a_step(2))
    assert len(groups) == 0


def test_a_difference_between_three_replicas_suspects_the_outvoted_rank() -> None:
    found = deviations(
        learnt(3),
        {0: manifest(weight=7, bias=8), 1: manifest(weight=7, bias=9), 2: manifest(weight=7, bias=8)},
    )
    assert [deviation.suspects for deviation in found] == [(1,)]
    assert found[0].group == ((0, BIAS), (1, BIAS), (2, BIAS))
    assert "rank 1 differs from the majority" in str(found[0])


def test_a_difference_between_two_replicas_suspects_nobody() -> None:
    found = deviations(learnt(2), {0: manifest(weight=7, bias=8), 1: manifest(weight=6, bias=8)})
    assert [deviation.suspects for deviation in found] == [()]
    assert str(found[0]) == f"replicas differ: buffer {WEIGHT} of rank 0, buffer {WEIGHT} of rank 1"


def test_a_buffer_that_one_rank_has_freed_is_no_difference() -> None:
    assert not deviations(learnt(2), {0: manifest(weight=7, bias=8), 1: manifest(weight=7)})


def test_a_group_that_parted_rightly_is_not_asked_again_even_if_it_agrees_once_more() -> None:
    groups = learnt(2)
    different = {0: manifest(weight=7, bias=8), 1: manifest(weight=6, bias=8)}
    groups.distrust([deviation.group for deviation in deviations(groups, different)])
    assert not deviations(groups, different)
    for turn in range(10):
        groups.learn(
            {rank: manifest(weight=300 + turn, bias=400 + turn) for rank in range(2)}, at_the_end_of_a_step(2)
        )
    assert len(groups) == 1


def test_ranks_that_stand_at_other_points_of_the_program_are_not_compared_and_nothing_is_forgotten() -> None:
    groups = learnt(3)
    parted = {0: manifest(weight=1, bias=2), 1: manifest(weight=3, bias=4), 2: manifest(weight=5, bias=6)}
    for points in ({0: (7, 0), 1: (7, 12), 2: (7, 0)}, {0: (7, 0), 1: (8, 0), 2: (9, 0)}):
        assert not deviations(groups, parted, points)
        groups.learn(parted, points)
        assert len(groups) == 2
    assert len(deviations(groups, parted)) == 2
    groups = ReplicaGroups()
    for turn in range(AGREED_CHANGES + 5):
        alike = {rank: manifest(weight=100 + turn) for rank in range(2)}
        groups.learn(alike, {0: (turn, 0), 1: (turn, 9)})
    assert len(groups) == 0
