"""Faults of which whoever recovers a job is told as it is taken over: nobody else will tell of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from understudy.recovery.planning.takeover.reports import RankReport

BROKEN_OFF = "a recovery broke off its collectives, and died with the proxyd that led it"
COLLECTIVE, VALIDATION = "collective", "validation"
"""Kinds of reports.  The second is of no fault: a rank stands at the end of a minibatch that is validated."""


@dataclass(frozen=True, slots=True)
class FaultNotice:
    """`kind` is as in FaultReport; `record_index` None: where its device server is."""

    rank: int
    kind: str
    message: str = ""
    record_index: int | None = None

    @property
    def of_communicators(self) -> bool:
        """Whether it is of a generation of communicators, else of a device server."""
        return self.kind in (COLLECTIVE, VALIDATION)


def notice_of(report: RankReport) -> FaultNotice | None:
    """What is to be told of one rank; None: nothing, or the end of its device server tells all.

    Why it stands tells more than that somebody had it stand still.  But a rank that was parked cannot be
    validated: ranks that it computes with have been taken out of that minibatch.
    """
    if not (report.active and report.server_runs):
        return None
    fault = None if report.fault_in_hand else report.fault
    if fault is not None and fault.kind != VALIDATION:
        return FaultNotice(report.rank, fault.kind, fault.message, fault.record_index)
    if report.left_unfinished:
        return FaultNotice(report.rank, COLLECTIVE, BROKEN_OFF)
    return FaultNotice(report.rank, VALIDATION) if fault is not None else None


def notices_of(reports: Iterable[RankReport]) -> Iterator[FaultNotice]:
    """One of a rank at most."""
    for report in reports:
        notice = notice_of(report)
        if notice is not None:
            yield notice
