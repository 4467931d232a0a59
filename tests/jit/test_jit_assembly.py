"""Which step a job resumes from, and from which replicas, decided from facts alone (paper 001 §3.3)."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from understudy.jit.assembly import Attempt, Outcome, Save, absent, assemble, in_order, lacking
from understudy.jit.digest import FileDigest


def world(*shards: str, number: int = 1, name: str = "first", announced: int | None = None) -> Attempt:
    """Rank r has the r-th shard; only so many have announced themselves."""
    known = dict(list(enumerate(shards))[:announced])
    return Attempt(number, name, len(shards), known, {rank: f"host-{rank}" for rank in known})


def save(
    step: int,
    rank: int,
    shard: str = "0",
    *,
    content: str = "same",
    attempt: str = "first",
    world_size: int = 4,
    periodic: bool = False,
    unique: int = 0,
) -> Save:
    return Save(
        name=f"step-{step}.shard-{shard}.rank-{rank}.{unique:016x}",
        job="job",
        attempt=attempt,
        step=step,
        shard=shard,
        rank=rank,
        world_size=world_size,
        host=f"host-{rank}",
        reason="a test",
        periodic=periodic,
        root=Path("/nowhere"),
        payload="payload",
        files={"payload": FileDigest(1, content)},
        digest=content,
        metadata={},
    )


def steps(outcome: Outcome) -> list[int]:
    return [candidate.step for candidate in outcome.candidates]


def ranks(saves: Iterable[Save]) -> list[int]:
    return [one.rank for one in saves]


def test_the_newest_step_that_all_shards_have_comes_first() -> None:
    saves = [save(step, rank, f"s{rank % 2}") for step in (3, 5, 4) for rank in (0, 1)]

    assert steps(assemble(saves, [world("s0", "s1", "s0", "s1")])) == [5, 4, 3]


def test_a_shard_that_was_announced_and_is_missing_makes_the_older_complete_step_be_taken() -> None:
    saves = [save(7, 0, "a"), save(6, 0, "a"), save(6, 3, "b")]

    outcome = assemble(saves, [world("a", "b", "a", "b")])

    assert steps(outcome) == [6]
    [(step, why)] = outcome.passed_over
    assert step == 7 and "nobody has saved the shards b" in why


def test_shards_of_steps_i_and_i_plus_1_are_no_step() -> None:
    outcome = assemble([save(7, 0, "a"), save(8, 1, "b")], [world("a", "b", "a", "b")])

    assert not outcome.candidates and len(outcome.passed_over) == 2


def test_shards_of_one_step_from_two_attempts_are_no_step() -> None:
    attempts = [world("a", "b", number=1), world("a", "b", number=2, name="second")]
    saves = [save(7, 0, "a", world_size=2), save(7, 1, "b", attempt="second", world_size=2)]

    assert not assemble(saves, attempts).candidates


def test_of_equal_steps_that_of_the_newest_attempt_comes_first() -> None:
    attempts = [world("0", number=9, name="late"), world("0", number=2, name="z-early")]
    saves = [save(7, 0, attempt=name, world_size=1) for name in ("z-early", "late")]

    assert [one.attempt for one in assemble(saves, attempts).candidates] == [9, 2]


def test_nothing_is_taken_while_it_is_unknown_which_shards_there_are() -> None:
    outcome = assemble([save(7, 0, "a"), save(7, 1, "b")], [world("a", "b", "a", "c", announced=2)])

    assert not outcome.candidates
    assert "only 2 of 4 ranks announced" in outcome.passed_over[0][1]


def test_saves_of_all_ranks_replace_a_lost_announcement() -> None:
    saves = [save(7, rank, f"s{rank}", world_size=2) for rank in range(2)]

    assert steps(assemble(saves, [])) == [7]
    assert steps(assemble(saves, [world("s0", "s1", announced=1)])) == [7]
    assert not assemble(saves[:1], []).candidates


def test_an_attempt_with_fewer_ranks_takes_what_more_ranks_saved_if_its_shards_are_the_same() -> None:
    now = world("a", "b", number=2, name="second")
    saves = [save(7, 0, "a"), save(7, 3, "b")]

    assert steps(assemble(saves, [world("a", "b", "a", "b"), now], now)) == [7]


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (world("a", number=2, name="second"), "shards b would be taken by no rank"),
        (world("a", "b", "c", number=2, name="second"), "it has not the shards c"),
        (world("c", "a", "b", number=2, name="second", announced=1), "it has not the shards c"),
    ],
    ids=["fewer", "more", "more, partly announced"],
)
def test_what_was_saved_in_other_shards_is_not_taken(now: Attempt, said: str) -> None:
    saves = [save(7, 0, "a", world_size=2), save(7, 1, "b", world_size=2)]

    outcome = assemble(saves, [world("a", "b"), now], now)

    assert not outcome.candidates and said in outcome.passed_over[0][1]


def test_rank_0_chooses_before_the_others_have_announced_themselves() -> None:
    now = world("a", "b", number=2, name="second", announced=1)
    saves = [save(7, 0, "a", world_size=2), save(7, 1, "b", world_size=2)]

    assert steps(assemble(saves, [world("a", "b"), now], now)) == [7]


def test_two_replicas_outvote_one_of_a_lower_rank_and_that_is_reported() -> None:
    order, remark = in_order([save(7, 2), save(7, 0, content="other"), save(7, 3)])

    assert ranks(order) == [2, 3, 0]
    assert remark is not None and "ranks 2, 3 against ranks 0; the majority is taken" in remark


def test_at_a_tie_the_lowest_rank_has_its_way_and_that_is_reported() -> None:
    order, remark = in_order(
        [save(7, 3), save(7, 1, content="other"), save(7, 2), save(7, 9, content="other")]
    )

    assert ranks(order) == [1, 9, 2, 3]
    assert remark is not None and "the lowest rank, 1, is taken" in remark


def test_replicas_that_are_alike_are_not_worth_a_remark() -> None:
    assert in_order([save(7, 1), save(7, 0)]) == ([save(7, 0), save(7, 1)], None)


def test_a_rank_that_saved_twice_has_one_vote_and_both_saves_are_tried() -> None:
    order, _ = in_order([save(7, 1, unique=1), save(7, 1, unique=2), save(7, 0, content="other")])

    assert ranks(order) == [0, 1, 1]


def test_a_periodic_checkpoint_of_the_same_step_has_no_vote_but_is_tried_last() -> None:
    order, remark = in_order([save(7, 0, content="other", periodic=True), save(7, 3)])

    assert ranks(order) == [3, 0] and remark is None


def test_a_step_may_have_one_shard_just_in_time_and_another_from_a_periodic_checkpoint() -> None:
    saves = [save(7, 0, "a", periodic=True), save(7, 3, "b")]

    assert steps(assemble(saves, [world("a", "b", "a", "b")])) == [7]


def test_what_lacks_is_named_for_each_step() -> None:
    attempt, saves = (
        world("a", "b", "c"),
        [save(7, 0, "a"), save(8, 1, "b"), save(7, 1, "b", attempt="other")],
    )

    assert lacking(7, saves, attempt) == ["b", "c"]
    assert lacking(8, saves, attempt) == ["a", "c"]


def test_a_rank_that_arrived_one_step_earlier_is_not_absent() -> None:
    attempt = world("a", "b", "a", "b")

    assert absent(8, attempt, {0: 8, 1: 7, 2: 6}) == {2: "host-2", 3: "host-3"}


def test_the_outcome_does_not_depend_on_the_order_of_what_was_found() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(200):
        attempts = [
            world("a", "b", number=number, name=name) for number, name in enumerate(("first", "second"), 1)
        ]
        saves = [
            save(
                chance.randrange(3),
                rank,
                "ab"[rank],
                content=chance.choice("xy"),
                attempt=chance.choice(("first", "second")),
                world_size=2,
                periodic=chance.random() < 0.2,
                unique=unique,
            )
            for unique, rank in enumerate(chance.choices((0, 1), k=8))
        ]
        outcome = assemble(saves, attempts)
        shuffled = chance.sample(saves, len(saves))

        assert assemble(shuffled, attempts[::-1]) == outcome
        for candidate in outcome.candidates:  # never a mixture, and always whole
            members = [one for replicas in candidate.replicas.values() for one in replicas]
            assert {one.step for one in members} == {candidate.step}
            assert len({one.attempt for one in members}) == 1
            assert set(candidate.replicas) == {"a", "b"}
