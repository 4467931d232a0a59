"""What is true of a job from the moment on in which somebody takes it over, whoever that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from understudy.recovery.planning.takeover.histories import Drill, End, History, merged
from understudy.recovery.planning.takeover.notices import FaultNotice, notices_of
from understudy.recovery.planning.takeover.reports import RankReport


@dataclass(frozen=True, slots=True)
class Takeover(Generic[End, Drill]):
    """`notices`: what whoever recovers the job is to be told at once."""

    history: History[End, Drill]
    notices: tuple[FaultNotice, ...]


def takeover(
    written: History[End, Drill], here: History[End, Drill], reports: Sequence[RankReport]
) -> Takeover[End, Drill]:
    """`written`: by whoever led it; `here`: what has been seen on the host that takes it over.

    `reports`: its ranks there.  Those of other hosts follow when these are reached: `fate_of` says then what
    has become of each, and `notice_of` what is told of it.
    """
    history = merged(
        written, here, [report.rank for report in reports],
        newest_generation=max((report.newest_generation for report in reports), default=0),
        cut_short=any(report.cut_short for report in reports),
    )  # fmt: skip
    return Takeover(history, tuple(notices_of(reports)))
