"""The decision what to do after a fault: pure functions, checked on small worlds against brute force."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from recovery.cuts import CutSearch, kept_commits
from recovery.facts import (
    BEGINNING,
    BufferFacts,
    CommitFacts,
    Facts,
    FaultFacts,
    FaultKind,
    Manifest,
    Phase,
    RankFacts,
)
from recovery.planner import (
    COMPLETE_WITHIN,
    Continue,
    Lose,
    Plan,
    PlanName,
    Restart,
    Rewind,
    consistent_floor,
    plan,
)
from recovery.replicas import ReplicaTracker, match, replicated_handles

WORLD = (1, 2)
"""A communicator of all ranks."""


def commit(number: int, sequence: int | None = None, **other: object) -> CommitFacts:
    done = number if sequence is None else sequence
    return replace(CommitFacts(number, step=number, communicators=((*WORLD, done),)), **other)  # type: ignore[arg-type]


def parameters(*digests: int, shadowed: bool = False, size: int = 100) -> Manifest:
    return tuple(BufferFacts(10 + n, size, digest, shadowed) for n, digest in enumerate(digests))


def rank(number: int, newest: int = 3, **other: object) -> RankFacts:
    """Commits 1…newest, each with one replicated buffer whose content changes from commit to commit."""
    commits = tuple(commit(n) for n in range(1, newest + 1))
    manifests = {n: parameters(1000 + n) for n in range(1, newest + 1)}
    return replace(
        RankFacts(
            number, commits=commits, manifests=manifests, log_complete_from_start=False, floor_commit=1
        ),
        **other,  # type: ignore[arg-type]
    )


def died(*ranks: int, **other: object) -> FaultFacts:
    return replace(FaultFacts(FaultKind.SERVER_DIED, ranks), **other)  # type: ignore[arg-type]


def lost_ranks(chosen: Plan) -> list[int]:
    return [action.rank for action in chosen.actions if isinstance(action, Lose)]


def restarts(chosen: Plan) -> list[Restart]:
    return [action for action in chosen.actions if isinstance(action, Restart)]


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
    alone = RankFacts(0, alive=False, commits=(CommitFacts(1, 1, complete=False, has_manifest=False),))
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
    assert chosen.actions == (Lose(0, "NaN in the link"), Lose(1, "NaN in the link"))


def test_giving_up_leaves_ranks_without_a_common_communicator_alone() -> None:
    apart = rank(2, commits=(CommitFacts(1, 1, communicators=((5, 5, 1),)),), manifests={})
    chosen = plan(Facts((rank(0), rank(1), apart), died(1, attempts=3)))
    assert lost_ranks(chosen) == [0, 1]
    assert Continue(2) in chosen.actions


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


# ------------------------------------------------------------------ replicas
def test_equal_buffers_are_paired_by_their_order() -> None:
    wanted = parameters(5, 5, 6)
    offered = tuple(BufferFacts(handle, 100, digest, True) for handle, digest in ((1, 6), (2, 5), (3, 5)))
    copies, missing = match(wanted, {4: offered})
    assert [(copy.handle, copy.source_handle) for copy in copies] == [(10, 2), (11, 3), (12, 1)]
    assert missing == []


def test_more_wanted_than_offered_share_the_offered_ones() -> None:
    copies, missing = match(parameters(5, 5, 5), {0: parameters(5)})
    assert [copy.source_handle for copy in copies] == [10, 10, 10]
    assert missing == []


def test_buffer_without_digest_matches_nothing_and_empty_one_needs_nothing() -> None:
    unknown = BufferFacts(1, 100, None, False)
    empty = BufferFacts(2, 0, None, False)
    copies, missing = match((unknown, empty), {0: (replace(unknown, handle=9),)})
    assert copies == []
    assert missing == [unknown]


def test_replica_is_believed_after_two_checks_and_forgotten_when_contents_part() -> None:
    tracker = ReplicaTracker()
    same = {0: parameters(1, 2), 1: parameters(1, 3)}
    assert tracker.check(same) == {0: frozenset(), 1: frozenset()}
    assert tracker.check(same) == {0: frozenset({10}), 1: frozenset({10})}
    assert tracker.check({0: parameters(1), 1: parameters(4)}) == {0: frozenset(), 1: frozenset()}
    assert tracker.check(same) == {0: frozenset(), 1: frozenset()}


def test_equal_content_within_one_rank_is_no_replica() -> None:
    assert replicated_handles({0: parameters(1, 1), 1: parameters(2)}) == {0: frozenset(), 1: frozenset()}


# ------------------------------------------------------------------ floors
def test_floor_is_the_newest_cut_that_everybody_completed() -> None:
    assert consistent_floor([rank(0, 5), rank(1, 4)]) == {0: 4, 1: 4}


def test_floor_waits_for_a_commit_that_can_be_rebuilt() -> None:
    half = rank(1, 4, commits=(commit(1), commit(2), commit(3, complete=False), commit(4, complete=False)))
    assert consistent_floor([rank(0, 4), half]) == {0: 2, 1: 2}


def test_floor_does_not_wait_forever_for_a_commit_that_can_be_rebuilt() -> None:
    last = COMPLETE_WITHIN + 3
    never = tuple(commit(n, complete=n == 1) for n in range(1, last + 1))
    assert consistent_floor([rank(0, last), rank(1, last, commits=never)]) == {0: last, 1: last}


def test_floor_stays_at_the_beginning_while_a_rank_may_still_join() -> None:
    start = RankFacts(1)
    assert consistent_floor([rank(0, 3, log_complete_from_start=True, floor_commit=0), start]) == {0: 0, 1: 0}


# ------------------------------------------------------------------ properties
def some_world(chance: random.Random) -> list[RankFacts]:
    """Ranks that ran for a while, with communicators over random subsets, each rank at a random place."""
    count = chance.randint(1, 4)
    groups = [
        sorted(chance.sample(range(count), chance.randint(1, count))) for _ in range(chance.randint(0, 3))
    ]
    ranks = []
    for number in range(count):
        sequences = {n: 0 for n, group in enumerate(groups) if number in group}
        commits = []
        for index in range(1, chance.randint(1, 6)):
            for group in sequences:
                sequences[group] += chance.choice([0, 1, 1, 2])
            marks = tuple((group, 0, done) for group, done in sorted(sequences.items()) if done)
            commits.append(
                CommitFacts(index, chance.choice([index, index, 1]), chance.random() < 0.8, True, marks)
            )
        manifests: dict[int, Manifest] = {
            made.number: parameters(*(chance.choice([1, 1, 2]) for _ in range(chance.randint(0, 2))),
                                    shadowed=chance.random() < 0.3)
            for made in commits
        }  # fmt: skip
        floor = chance.choice([0, 0, 1, 2])
        ranks.append(
            RankFacts(
                number, alive=chance.random() < 0.7, commits=tuple(commits), manifests=manifests,
                log_complete_from_start=chance.random() < 0.6, floor_commit=floor,
            )
        )  # fmt: skip
    return ranks


def sequence(of: RankFacts, at: CommitFacts, uid: tuple[int, int]) -> int:
    return next((done for low, high, done in at.communicators if (low, high) == uid), 0)


def is_consistent(ranks: list[RankFacts], cut: Mapping[int, CommitFacts]) -> bool:
    """The definition, word for word; a rank that never stepped and has no communicator may join any."""
    uids = {(low, high) for r in ranks for c in r.commits for low, high, _ in c.communicators}
    for uid in uids:
        members = [
            r
            for r in ranks
            if any((low, high) == uid for c in r.commits for low, high, _ in c.communicators)
            or (r.newest.step == 0 and not r.newest.communicators)
        ]
        if len({sequence(r, cut[r.rank], uid) for r in members}) > 1:
            return False
    return True


def consistent_cuts(
    ranks: list[RankFacts], choices: dict[int, list[CommitFacts]]
) -> list[dict[int, CommitFacts]]:
    numbers = [r.rank for r in ranks]
    every = (
        dict(zip(numbers, picked, strict=True))
        for picked in itertools.product(*(choices[n] for n in numbers))
    )
    return [cut for cut in every if is_consistent(ranks, cut)]


def is_newer(one: Mapping[int, CommitFacts], other: Mapping[int, CommitFacts]) -> bool:
    return all(one[r].number >= other[r].number for r in one) and any(
        one[r].number > other[r].number for r in one
    )


@pytest.mark.parametrize("repetition", range(20))
def test_newest_cut_is_consistent_and_none_is_newer(seed: int, repetition: int) -> None:
    chance = random.Random(seed + repetition)
    for _ in range(40):
        ranks = some_world(chance)
        choices = {r.rank: kept_commits(r) for r in ranks}
        every = consistent_cuts(ranks, choices)
        newest = CutSearch(ranks, choices).newest()
        assert (newest is None) == (not every)
        if newest is not None:
            assert is_consistent(ranks, newest)
            assert not [cut for cut in every if is_newer(cut, newest)]


@pytest.mark.parametrize("repetition", range(20))
def test_search_visits_every_consistent_cut_newer_ones_first(seed: int, repetition: int) -> None:
    chance = random.Random(seed + repetition)
    for _ in range(20):
        ranks = some_world(chance)
        choices = {r.rank: kept_commits(r) for r in ranks}
        visited = list(CutSearch(ranks, choices).newest_first())
        assert len(visited) == len(consistent_cuts(ranks, choices))
        for earlier, later in itertools.combinations(visited, 2):
            assert not is_newer(later, earlier)


@pytest.mark.parametrize("repetition", range(20))
def test_plan_is_viable_and_no_newer_viable_cut_exists(seed: int, repetition: int) -> None:
    chance = random.Random(seed + repetition)
    for _ in range(40):
        ranks = some_world(chance)
        dead = tuple(r.rank for r in ranks if not r.alive) or (0,)
        chosen = plan(Facts(tuple(ranks), died(*dead)))
        choices = {
            r.rank: [
                c for c in kept_commits(r) if r.alive or c is BEGINNING or (c.complete and c.has_manifest)
            ]
            for r in ranks
        }
        viable = [cut for cut in consistent_cuts(ranks, choices) if is_viable(ranks, cut)]
        assert (chosen.name is PlanName.GIVE_UP) == (not viable)
        if viable:
            taken = {r.rank: by_number(r, chosen.targets[r.rank]) for r in ranks}
            assert taken in viable
            assert not [cut for cut in viable if is_newer(cut, taken)]
            check_copies(ranks, taken, chosen)


def by_number(of: RankFacts, number: int) -> CommitFacts:
    return next((c for c in of.commits if c.number == number), BEGINNING)


def offers(
    ranks: list[RankFacts], cut: Mapping[int, CommitFacts], step: int
) -> set[tuple[int, int, int, int | None]]:
    """(rank, handle, bytes, digest) that survivors hold at this cut and step."""
    return {
        (r.rank, b.handle, b.bytes, b.digest)
        for r in ranks
        if r.alive and cut[r.rank].number and cut[r.rank].step == step
        for b in r.manifests[cut[r.rank].number]
    }


def is_viable(ranks: list[RankFacts], cut: Mapping[int, CommitFacts]) -> bool:
    for r in ranks:
        if r.alive or cut[r.rank] is BEGINNING:
            continue
        held = {content[2:] for content in offers(ranks, cut, cut[r.rank].step)}
        if any(not b.shadowed and (b.bytes, b.digest) not in held for b in r.manifests[cut[r.rank].number]):
            return False
    return True


def check_copies(ranks: list[RankFacts], cut: Mapping[int, CommitFacts], chosen: Plan) -> None:
    for restart in restarts(chosen):
        held = offers(ranks, cut, cut[restart.rank].step)
        assert all((c.source, c.source_handle, c.bytes, c.digest) in held for c in restart.copies)
        if restart.commit:
            manifest = ranks[restart.rank].manifests[restart.commit]
            assert [c.handle for c in restart.copies] == [b.handle for b in manifest if not b.shadowed]


def test_cut_of_sixty_four_commits_on_sixteen_ranks_is_found_at_once() -> None:
    ranks = [
        rank(n, 64, commits=tuple(commit(c, c * 20) for c in range(1, 64 + n % 2)), manifests={})
        for n in range(16)
    ]
    assert consistent_floor(ranks) == dict.fromkeys(range(16), 63)
