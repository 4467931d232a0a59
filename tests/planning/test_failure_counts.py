"""What counts as the same failure once more: the third time it is the program's."""

from __future__ import annotations

import pytest

from understudy.recovery.planning.facts import FaultKind, Phase
from understudy.recovery.state.failure_counts import FailureCounts
from understudy.recovery.state.incidents import Fault


def died(
    record: int, *, rank: int = 0, kind: FaultKind = FaultKind.SERVER_DIED, drill: bool = False
) -> Fault:
    return Fault(kind, rank, 1, 1, Phase.FORWARD_BACKWARD, record, "", 0, 0, drill, "")


@pytest.mark.parametrize(
    ("places", "by_record", "by_commit"),
    [
        ([(10, 4), (10, 4), (10, 4)], [1, 2, 3], [1, 2, 3]),
        ([(10, 4), (12, 4), (11, 4)], [1, 1, 1], [1, 2, 3]),
        ([(10, 4), (10, 5), (10, 6)], [1, 2, 3], [1, 1, 1]),
        ([(10, 4), (9, 3), (11, 4), (30, 5)], [1, 1, 1, 1], [1, 2, 3, 1]),  # replays begin at commits before
        ([(5, 0), (7, 0), (7, 1)], [1, 1, 2], [1, 2, 1]),
    ],
)
def test_failures_are_the_same_at_one_record_or_where_errors_come_late_behind_one_commit(
    places: list[tuple[int, int]], by_record: list[int], by_commit: list[int]
) -> None:
    for asynchronous, expected in ((False, by_record), (True, by_commit)):
        counts = FailureCounts()
        found = []
        for record, commit in places:
            counts.add(died(record), commit, asynchronous)
            found.append(counts.of(died(record)))
        assert found == expected


def test_the_next_attempt_after_the_second_failure_goes_slowly_up_to_the_commit_that_was_not_reached() -> (
    None
):
    counts = FailureCounts()
    found = []
    for record, commit in ((10, 4), (12, 4), (11, 4), (30, 5)):
        counts.add(died(record), commit, True)
        found.append(counts.commit_to_pass(died(record)))
    assert found == [0, 5, 5, 0]
    assert counts.commit_to_pass(died(11, rank=1)) == 0


def test_ranks_and_kinds_are_counted_apart_and_drills_and_echoes_not_at_all() -> None:
    counts = FailureCounts()
    for _ in range(2):
        counts.add(died(10), 4, False)
    counts.add(died(10, rank=1), 4, False)
    counts.add(died(10, kind=FaultKind.CALL_FAILED), 4, False)
    assert counts.of(died(10)) == 2
    assert counts.of(died(10, rank=1)) == counts.of(died(10, kind=FaultKind.CALL_FAILED)) == 1
    assert counts.of(died(10, drill=True)) == counts.of(died(11)) == counts.of(died(10, rank=2)) == 1
    counts.forget(died(10))
    assert counts.of(died(10)) == 1
    counts.add(died(10), 4, False)
    assert counts.of(died(10)) == 1
