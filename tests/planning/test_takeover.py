"""What is true of a job once it is taken over: nobody is left standing, nothing is told twice or lost."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from understudy.recovery.planning.takeover.histories import History
from understudy.recovery.planning.takeover.reports import OpenFault, RankReport
from understudy.recovery.planning.takeover.takeover import takeover

NOTHING: History[RankReport, str] = History()
FAULTS = [None, *map(OpenFault, ("call", "suspect", "restart", "collective", "validation"))]
REPORTS = st.builds(
    RankReport, st.integers(0, 3), st.booleans(), st.booleans(), st.booleans(), st.sampled_from(FAULTS),
    st.booleans(), st.booleans(), st.booleans(), st.integers(0, 9), st.booleans(),
)  # fmt: skip


def test_every_report_has_the_one_notice_that_gets_its_rank_to_go_on() -> None:
    """Whoever stands, for whatever reason, is told of, unless it is being dealt with, or has no server."""
    flags = (False, True)
    for runs, holds, parked, fault, in_hand, known, prepared, active in itertools.product(
        flags, flags, flags, FAULTS, flags, flags, flags, flags
    ):
        report = RankReport(1, runs, holds, parked, fault, in_hand, known, prepared, 0, active)
        stands = parked or not (holds or in_hand) or (fault is not None and not known)
        found = takeover(NOTHING, NOTHING, [report])
        assert [notice.rank for notice in found.notices] == ([1] if runs and active and stands else [])
        left = prepared or (runs and (parked or not (holds or in_hand)))
        assert found.history.under_way == (active and left)


@given(st.lists(REPORTS, unique_by=lambda report: report.rank), st.integers(0, 9), st.booleans())
def test_ranks_are_told_of_one_by_one_and_count_together(
    reports: list[RankReport], generation: int, decided: bool
) -> None:
    written: History[RankReport, str] = History(
        generation, departed=dict.fromkeys(range(4), True), under_way=decided
    )
    found = takeover(written, NOTHING, reports)
    apart = [takeover(written, NOTHING, [report]) for report in reports]
    assert list(found.notices) == [notice for one in apart for notice in one.notices]
    assert found.history.generation == max([generation, *(one.newest_generation for one in reports)])
    assert found.history.under_way == (decided or any(one.history.under_way for one in apart))
    assert found.history.departed.keys() == set(range(4)) - {report.rank for report in reports}
