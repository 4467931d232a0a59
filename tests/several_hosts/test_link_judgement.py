"""Which hosts count as cut off from the data network, by what all of them tell of it."""

from __future__ import annotations

import itertools
import random

import pytest

from understudy.recovery.planning.link_judgement import Matrix, Seen, judge_links


def matrix(hosts: str, *broken: str, silent: str = "", unplugged: str = "") -> Matrix:
    """All reach each other but for `broken`: "ab" = a does not reach b, "a-b" = nor the other way round."""
    failing = {(one[0], one[-1]) for one in broken} | {(one[2], one[0]) for one in broken if "-" in one}
    return {
        host: Seen(
            {other: (host, other) not in failing for other in hosts if other != host},
            "down" if host in unplugged else "up",
        )
        for host in hosts if host not in silent
    }  # fmt: skip


def test_nobody_is_cut_off_where_all_reach_each_other_or_nobody_was_asked() -> None:
    assert judge_links({}) == judge_links(matrix("a")) == judge_links(matrix("abcd")) == frozenset()


@pytest.mark.parametrize("hosts", ["abc", "abcd", "abcdefgh"])
def test_host_that_most_do_not_reach_is_cut_off(hosts: str) -> None:
    for victim in hosts:
        broken = [f"{victim}-{other}" for other in hosts if other != victim]
        assert judge_links(matrix(hosts, *broken)) == {victim}
        assert judge_links(matrix(hosts, *broken, silent=victim)) == {victim}


def test_one_direction_that_fails_counts_as_both_do_for_collectives() -> None:
    assert judge_links(matrix("abc", "ac", "bc")) == {"c"}
    assert judge_links(matrix("abc", "ca", "cb")) == {"c"}


def test_a_single_link_that_fails_among_three_cuts_nobody_off() -> None:
    assert judge_links(matrix("abc", "a-b")) == frozenset()
    assert judge_links(matrix("abcd", "a-b")) == frozenset()


def test_of_two_halves_one_stays_and_it_is_that_of_the_first_name() -> None:
    halves = [f"{one}-{other}" for one, other in itertools.product("ab", "cd")]
    assert judge_links(matrix("abcd", *halves)) == {"c", "d"}
    assert judge_links(matrix("abcde", *halves, *[f"e-{one}" for one in "ab"])) == {"a", "b"}


def test_where_nobody_reaches_anybody_no_host_is_at_fault() -> None:
    all_of_them = [f"{one}-{other}" for one, other in itertools.combinations("abcd", 2)]
    assert judge_links(matrix("abcd", *all_of_them)) == frozenset()


def test_of_two_hosts_the_one_without_carrier_goes_else_the_silent_one_else_the_last() -> None:
    assert judge_links(matrix("ab", "a-b")) == {"b"}
    assert judge_links(matrix("ab", "a-b", unplugged="a")) == {"a"}
    assert judge_links(matrix("ab", "a-b", silent="a")) == {"a"}
    assert judge_links(matrix("ab", "a-b", silent="b")) == {"b"}
    assert judge_links(matrix("ab", "ab")) == frozenset(), "one direction alone: nobody can tell"


def test_carrier_that_is_down_counts_only_if_somebody_misses_the_host() -> None:
    assert judge_links(matrix("abc", unplugged="a")) == frozenset()
    assert judge_links(matrix("abc", "a-b", unplugged="a")) == {"a"}
    assert judge_links(matrix("ab", "a-b", unplugged="ab")) == {"a", "b"}


def test_who_cannot_tell_does_not_count() -> None:
    seen = {
        "a": Seen({"b": True, "c": None}),
        "b": Seen({"a": True, "c": False}),
        "c": Seen({"a": None, "b": None}),
    }
    assert judge_links(seen) == {"c"}
    assert judge_links({"a": Seen({"b": None}), "b": Seen({"a": None})}) == frozenset()


def test_whatever_is_told_nobody_is_missed_by_most_of_those_who_are_left_and_the_order_does_not_matter(
    seed: int,
) -> None:
    chance = random.Random(seed)
    for _ in range(2000):
        hosts = "abcdef"[: chance.randint(1, 6)]
        told = {
            host: Seen(
                {other: chance.choice((True, True, False, None)) for other in hosts if other != host},
                chance.choice(("up", "up", "down", "")),
            )
            for host in hosts if chance.random() < 0.9
        }  # fmt: skip
        cut = judge_links(told)
        assert cut <= set(hosts)
        shuffled = list(told.items())
        chance.shuffle(shuffled)
        assert judge_links(dict(shuffled)) == cut, told
        rest = {
            host: Seen({one: vote for one, vote in seen.reaches.items() if one not in cut}, seen.carrier)
            for host, seen in told.items() if host not in cut
        }  # fmt: skip
        assert judge_links(rest) == frozenset(), (told, cut)
