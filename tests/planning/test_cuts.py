"""Consistent cuts, floors and replicas: by example, and random worlds against brute force."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
from made_up_facts import commit, died, having, parameters, rank, restarts

from understudy.recovery.planning.communicators import connected
from understudy.recovery.planning.cuts import CutSearch, kept_commits
from understudy.recovery.planning.facts import (
    BEGINNING,
    BufferFacts,
    CommitFacts,
    Facts,
    Manifest,
    RankFacts,
)
from understudy.recovery.planning.planner import (
    COMPLETE_WITHIN,
    Plan,
    PlanName,
    Reload,
    Rewind,
    consistent_floor,
    plan,
)
from understudy.recovery.planning.replicas import Copy, Holders, ReplicaTracker, replicated_handles


# ------------------------------------------------------------------ communicators
def marked(number: int, *uids: tuple[int, int], members: int = 2) -> CommitFacts:
    """A commit that knows these (communicator, collectives)."""
    marks = having(*((uid, 0, done) for uid, done in uids))
    return CommitFacts(number, number, members=(members,) * len(uids), index=number, **marks)


def test_rank_without_a_commit_is_in_no_communicator_whose_members_are_all_known() -> None:
    pair = [rank(number, commits=(marked(1, (7, 1)),), manifests={}) for number in (0, 1)]
    pair = [replace(one, floor_commit=1) for one in pair]
    assert consistent_floor([*pair, RankFacts(2)]) == {0: 1, 1: 1, 2: 0}
    missing = [replace(one, commits=(marked(1, (7, 1), members=3),)) for one in pair]
    assert consistent_floor([*missing, RankFacts(2)]) == {}, "it may be the third member"


def test_communicator_that_a_peer_learns_of_only_after_its_commit_is_consistent_nowhere_before() -> None:
    ahead = rank(0, commits=(marked(1, (1, 1)), marked(2, (1, 2), (7, 3))), manifests={})
    behind = rank(1, commits=(marked(1, (1, 1)), marked(2, (1, 2))), manifests={})
    assert consistent_floor([ahead, behind]) == {0: 1, 1: 1}


def test_communicator_that_came_and_went_between_two_commits_divides_them() -> None:
    """No commit knew of it, and one rank went back behind its collectives, the other not."""
    gone = (1 << 64) - 1  # as a server publishes it
    ahead = rank(0, commits=(marked(1, (1, 1)), marked(2, (1, 1), (7, gone))), manifests={})
    behind = rank(1, commits=(marked(1, (1, 1)),), manifests={})
    both = [ahead, behind]
    newest = CutSearch(both, {of.rank: kept_commits(of) for of in both}).newest()
    assert newest is not None
    assert {number: at.number for number, at in newest.items()} == {0: 1, 1: 1}


def test_communicator_that_all_have_given_up_may_be_forgotten_by_some_of_them() -> None:
    """A ring keeps its last commits only, and ranks differ in how many they make in a step."""
    gone = (1 << 64) - 1
    remembers = rank(0, commits=tuple(marked(n, (1, n), *[(7, gone)] * (n == 2)) for n in (1, 2, 3, 4)),
                     manifests={})  # fmt: skip
    forgot = rank(1, commits=tuple(marked(n, (1, n)) for n in (3, 4)), manifests={})
    behind = [replace(one, floor_commit=3, log_complete_from_start=False) for one in (remembers, forgot)]
    assert consistent_floor(behind) == {0: 4, 1: 4}
    assert plan(Facts(tuple(behind), died(0, attempts=1))).name is not PlanName.GIVE_UP
    before = replace(forgot, commits=remembers.commits[:1])
    amid = [replace(one, floor_commit=1) for one in (remembers, before)]
    assert consistent_floor(amid) == {0: 1, 1: 1}, "the other one may have it yet to come"


def test_messages_that_cross_each_other_and_a_commit_are_not_consistent() -> None:
    """Both have sent one and received none: as one count of the pair they would look alike."""
    to, back = 101, 102
    one = rank(0, commits=(marked(1, (1, 0)), marked(2, (1, 0), (to, 1), (back, 0))), manifests={})
    other = rank(1, commits=(marked(1, (1, 0)), marked(2, (1, 0), (to, 0), (back, 1))), manifests={})
    assert consistent_floor([one, other]) == {0: 1, 1: 1}


def test_communicator_whose_members_are_all_known_concerns_nobody_else() -> None:
    pair = [rank(n, commits=(marked(1, (1, 1)), marked(2, (1, 2))), manifests={}) for n in (0, 1)]
    apart = rank(2, commits=(CommitFacts(1, 1, index=1),), manifests={})
    assert connected([*pair, apart], [0]) == {0, 1}
    assert consistent_floor([*pair, apart]) == {0: 2, 1: 2, 2: 1}


# ------------------------------------------------------------------ replicas
def match(wanted: Manifest, offers: dict[int, Manifest]) -> tuple[list[Copy], list[BufferFacts]]:
    """For one reader, on the host of all others."""
    holders = [rank(number, manifests={1: manifest}) for number, manifest in offers.items()]
    return Holders(holders, dict.fromkeys(offers, CommitFacts(1, 1)), [("", wanted)]).match(wanted, "")


def test_equal_buffers_are_paired_by_their_order() -> None:
    wanted = parameters(5, 5, 6)
    offered = tuple(BufferFacts(handle, 100, digest, True) for handle, digest in ((1, 6), (2, 5), (3, 5)))
    copies, missing = match(wanted, {4: offered})
    assert [(copy.handle, copy.source_handle) for copy in copies] == [(10, 2), (11, 3), (12, 1)]
    assert missing == []


def test_a_copy_names_others_of_its_source_that_are_equal() -> None:
    """Which of them is the same thing there, and which is equal by chance, nobody knows."""
    equal = tuple(BufferFacts(handle, 100, 5, True) for handle in range(1, 12))
    copies, _ = match(parameters(5, 5), {4: equal[:3], 6: equal})
    assert [(copy.source, copy.source_handle, copy.others) for copy in copies] == [
        (4, 1, (2, 3)),
        (4, 2, (1, 3)),
    ]
    copies, _ = match(parameters(5), {6: equal})
    assert copies[0].others == tuple(range(2, 10)), "a few will do"


def test_more_wanted_than_offered_share_the_offered_ones() -> None:
    copies, missing = match(parameters(5, 5, 5), {0: parameters(5)})
    assert [copy.source_handle for copy in copies] == [10, 10, 10]
    assert missing == []


def test_buffer_without_digest_matches_nothing_and_empty_one_needs_nothing() -> None:
    unknown = BufferFacts(1, 100, None, False)
    empty = BufferFacts(2, 0, None, False)
    copies, missing = match((unknown, empty), {0: (unknown._replace(handle=9),)})
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
def test_ranks_that_have_begun_to_meet_since_their_commits_go_back_together() -> None:
    """All that may be members, where not all that are have come: it is not known who is missing."""
    meets = replace(rank(0, commits=(marked(4),)), begun=(((9, 0), 2),))
    alone = [rank(number, commits=(marked(4),)) for number in (1, 2)]
    assert connected([meets, *alone], [0]) == {0, 1, 2}
    other = replace(alone[0], begun=(((9, 0), 2),))
    assert connected([meets, other, alone[1]], [1]) == {0, 1}
    assert connected([meets, other, alone[1]], [2]) == {2}


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
            marks = having(*((group, 0, done) for group, done in sorted(sequences.items()) if done))
            commits.append(
                CommitFacts(
                    index, chance.choice([index, index, 1]), chance.random() < 0.8, True, index=index, **marks
                )
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
                snapshots=tuple(made for made in commits if chance.random() < 0.2),
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
def test_plan_is_viable_and_no_newer_viable_cut_exists(seed: int, repetition: int) -> None:
    chance = random.Random(seed + repetition)
    for _ in range(40):
        ranks = some_world(chance)
        dead = tuple(r.rank for r in ranks if not r.alive) or (0,)
        chosen = plan(Facts(tuple(ranks), died(*dead)))
        choices = {r.rank: without_snapshots(r) for r in ranks}
        viable = [cut for cut in consistent_cuts(ranks, choices) if is_viable(ranks, cut)]
        if not viable:
            check_snapshots(ranks, chosen)
        else:
            assert chosen.name in (PlanName.RESTART_COPY_REPLAY, PlanName.REWIND_IN_PLACE)
            taken = {r.rank: by_number(r, chosen.targets[r.rank]) for r in ranks}
            assert taken in viable
            assert not [cut for cut in viable if is_newer(cut, taken)]
            check_copies(ranks, taken, chosen)


def without_snapshots(of: RankFacts) -> list[CommitFacts]:
    return [
        c
        for c in kept_commits(of)
        if (of.alive or c is BEGINNING or (c.complete and c.has_manifest))
        and not (c is BEGINNING and of.snapshots)
    ]


def check_snapshots(ranks: list[RankFacts], chosen: Plan) -> None:
    """Nothing cheaper was possible: the newest cut of snapshots, and of what survivors keep themselves."""
    choices: dict[int, list[CommitFacts]] = {}
    for r in ranks:
        some = {c.number: c for c in (*r.snapshots, *(without_snapshots(r) if r.alive else []))}
        if r.log_complete_from_start:
            some[0] = BEGINNING
        choices[r.rank] = [some[number] for number in sorted(some)]
    every = consistent_cuts(ranks, choices)
    assert (chosen.name is PlanName.GIVE_UP) == (not every)
    if not every:
        return
    assert chosen.name is PlanName.RESTORE_SNAPSHOT_REPLAY
    taken = {r.rank: next(c for c in choices[r.rank] if c.number == chosen.targets[r.rank]) for r in ranks}
    assert taken in every
    assert not [cut for cut in every if is_newer(cut, taken)]
    for r, action in zip(ranks, chosen.actions, strict=True):
        if isinstance(action, Rewind):
            assert r.alive and taken[r.rank] in without_snapshots(r)
        else:
            assert isinstance(action, Reload)
            assert action.fresh == (not r.alive)


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
