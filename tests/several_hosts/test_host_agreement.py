"""When a host counts as lost: never by its lease alone, never by one look, never by a minority."""

from __future__ import annotations

from itertools import product

import pytest

from understudy.recovery.planning.agreement import ROUNDS, HostState, Vote, judge

VOTES = (Vote(True), Vote(False), Vote(None, "its certificate has expired"))


def settled(votes: dict[str, Vote]) -> HostState:
    """What is thought of it once every round has brought the same votes."""
    verdict = judge(True, votes)
    for _ in range(ROUNDS):
        verdict = judge(True, votes, verdict.rounds)
    return verdict.state


def test_host_whose_lease_lasts_is_alive_whatever_its_peers_say() -> None:
    for votes in product(VOTES, repeat=3):
        assert judge(True, {}).state is HostState.SUSPECTED
        assert judge(False, dict(zip("abc", votes, strict=True)), ROUNDS).state is HostState.ALIVE


@pytest.mark.parametrize("peers", range(6))
def test_host_without_lease_is_lost_only_if_more_than_half_of_those_asked_do_not_reach_it(peers: int) -> None:
    for votes in product(VOTES, repeat=peers):
        against = sum(vote.reaches is False for vote in votes)
        for_it = sum(vote.reaches is True for vote in votes)
        expected = HostState.LOST if against > for_it else HostState.SUSPECTED
        assert settled({str(number): vote for number, vote in enumerate(votes)}) is expected


def test_one_round_is_not_enough_and_one_that_speaks_for_the_host_begins_the_count_anew() -> None:
    against, for_it = {"a": Vote(False)}, {"a": Vote(True)}
    first = judge(True, against)
    assert (first.state, first.rounds) == (HostState.SUSPECTED, 1)
    assert judge(True, against, first.rounds).state is HostState.LOST
    assert judge(True, for_it, first.rounds).rounds == 0
    assert judge(True, {}, first.rounds).rounds == 0


def test_verdict_tells_who_said_what() -> None:
    votes = {"a": Vote(False), "b": Vote(False), "c": Vote(True), "d": Vote(None)}
    assert "2 of 3 that could be asked do not reach it (a, b)" in judge(True, votes).why
    assert "but c, d can reach it" in judge(True, {"a": Vote(False), "c": Vote(True), "d": Vote(True)}).why
    assert "nobody can be asked for it: no --listen" in judge(True, {"a": Vote(None, "no --listen")}).why
