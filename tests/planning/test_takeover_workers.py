"""Which workers go on, have ended or were superseded, by what their hosts tell who takes their job over."""

from __future__ import annotations

import itertools

import pytest

from understudy.recovery.planning.takeover.workers import (
    Fate,
    GivenUp,
    KnownWorker,
    ToldWorker,
    WorkerId,
    fate_of,
    fate_of_ended,
    fate_untold,
    missing,
)

HERE, AT_B, AT_C = WorkerId("", 7, 1), WorkerId("b", 7, 1), WorkerId("c", 9, 2)
OTHER_AT_B = WorkerId("b", 7, 5)
"""The pid was given to another process."""


@pytest.mark.parametrize(
    ("told", "known", "leaving", "expected"),
    [
        (AT_B, None, False, Fate.BEGAN),
        (AT_B, KnownWorker(AT_B), False, Fate.GOES_ON),
        (AT_B, KnownWorker(AT_B), True, Fate.GOES_ON),  # whether it arrives is to be seen
        (AT_B, KnownWorker(AT_B, active=False), False, Fate.GOES_ON),  # its program has failed
        (AT_B, KnownWorker(OTHER_AT_B), False, Fate.BEGAN),
        (AT_B, KnownWorker(AT_C), False, Fate.MOVED),
        (AT_B, KnownWorker(HERE), False, Fate.MOVED),
        (AT_B, KnownWorker(AT_C), True, Fate.LEAVES),
        (AT_B, KnownWorker(AT_C, active=False), False, Fate.BEGAN),  # it was started anew there
    ],
)
def test_what_has_become_of_a_worker_that_a_host_tells_of(
    told: WorkerId, known: KnownWorker | None, leaving: bool, expected: Fate
) -> None:
    assert fate_of(ToldWorker(told, leaving), known) == expected
    assert fate_of(ToldWorker(told, leaving), known, expected_at="d") == expected
    assert fate_of(ToldWorker(told, leaving), known, expected_at="b") == Fate.ARRIVED


@pytest.mark.parametrize(
    ("given_up", "worker", "ended"),
    [
        (GivenUp("b", 7, 1), AT_B, True),
        (GivenUp("b", 7), AT_B, True),  # nobody knew when it began
        (GivenUp("b", 7), OTHER_AT_B, True),
        (GivenUp("b", 7, 1), OTHER_AT_B, False),
        (GivenUp("b", 9, 1), AT_B, False),
        (GivenUp("c", 7, 1), AT_B, False),
    ],
)
def test_a_worker_whose_rank_was_given_up_is_ended_whatever_else_is_known(
    given_up: GivenUp, worker: WorkerId, ended: bool
) -> None:
    for known, expected_at, leaving in itertools.product(
        (None, KnownWorker(AT_B), KnownWorker(AT_C)), ("", "b"), (False, True)
    ):
        found = fate_of(ToldWorker(worker, leaving), known, expected_at, [given_up])
        assert (found is Fate.SUPERSEDED) == ended


def test_a_worker_of_which_its_host_does_not_tell_has_ended_unless_it_may_have_gone_elsewhere() -> None:
    assert fate_untold(KnownWorker(AT_B)) == Fate.ENDED
    assert fate_untold(KnownWorker(AT_B, may_be_away=True)) == Fate.AWAITED


@pytest.mark.parametrize(
    ("known", "departed", "expected"),
    [
        (None, False, Fate.BEGAN),  # it came and went unheard
        (None, True, Fate.UNKNOWN),  # it is known
        (KnownWorker(AT_B), False, Fate.ENDED),
        (KnownWorker(OTHER_AT_B), False, Fate.ENDED),  # so did the one before it
        (KnownWorker(AT_C), False, Fate.UNKNOWN),  # the rank went on elsewhere
        (KnownWorker(HERE), False, Fate.UNKNOWN),
    ],
)
def test_the_newest_end_of_a_rank_on_a_host(
    known: KnownWorker | None, departed: bool, expected: Fate
) -> None:
    assert fate_of_ended(AT_B, known, departed) == expected


def test_ranks_that_nobody_tells_of_are_missing_unless_they_have_departed() -> None:
    assert missing([], [], []) == []
    assert missing([4, 4], [0, 3], [2]) == [1]
    assert missing([2], [0, 1], []) == []
