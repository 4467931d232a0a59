"""What `proxyrun` says once its command has ended, and the status that it ends with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from understudy.recovery.base.errors import ExitStatus
from understudy.recovery.drills.spec import Drill
from understudy.recovery.history.report import (
    account_of_adoption,
    account_of_different,
    account_of_no_step,
    drill_of,
    ended_with_peer,
)

DRILL_NEVER_FIRED = ExitStatus.REFUSED
"""Of a run that succeeded although a scheduled fault never happened."""
VALUES_DIFFERENT = ExitStatus.FOUND_BAD
"""Of one that succeeded although replay gave other values than the program had been given."""
NOTHING_PROTECTED = "no rank used a device: nothing was protected"


def conclude(report: Any, drills: Sequence[Drill], status: int, *, whole: bool) -> tuple[list[str], int]:
    """The sentences, what matters most last, and proxyrun's own exit status.

    `status` is the command's; `whole`: all that the job did would stand in `report`, since it has one host.
    """
    idle = _never_fired(report, drills)
    ends = _status_of(report, idle) if status == 0 else status
    return list(_sentences(report, idle, status, ends, whole=whole)), ends


def _sentences(report: Any, idle: list[str], status: int, ends: int, *, whole: bool) -> Iterator[str]:
    yield from map(account_of_adoption, report.adoptions)
    yield from map(_account_of_recovery, report.recoveries)
    if report.error:
        yield report.error
    if report.automatic_commits and not report.steps:
        yield account_of_no_step(report.automatic_commits)
    for drill in idle:
        yield f"the drill '{drill}' never fired: the run has no such rank, step or call"
    if whole and not (status or report.error or report.ranks or report.records):
        yield NOTHING_PROTECTED
    if report.not_replayable and not report.replies_different:
        yield f"replay would give other numbers: {report.not_replayable}"
    if report.replies_different:
        sentence = account_of_different(report.replies_different)
        yield sentence if status else f"{sentence} (exit status {int(ends)})"
    if status:
        yield from report.refused  # each rank has said so too, far above what its launcher printed since


def _account_of_recovery(recovery: Any) -> str:
    what = f"{recovery.fault} on rank {recovery.rank} in step {recovery.step}, call {recovery.call}"
    if recovery.recovered:
        return f"{what}: recovered in {recovery.total_s:.3f} s ({recovery.plan})"
    if ended_with_peer(recovery):
        waited = f"rank {recovery.rank} was in a collective of step {recovery.step}, and ended as well"
        return f"{recovery.reason.partition(' (')[0]}: {waited}"
    return f"{what}: given up: {recovery.reason}"


def _never_fired(report: Any, drills: Sequence[Drill]) -> list[str]:
    if report.error and not report.faults:
        return [str(drill) for drill in drills]
    return [str(drill_of(fault.drill)) for fault in report.faults if not fault.fired]


def _status_of(report: Any, idle: list[str]) -> int:
    """The exit status of a run whose command has succeeded."""
    if report.replies_different:
        return VALUES_DIFFERENT
    if report.error:
        return ExitStatus.REFUSED
    return DRILL_NEVER_FIRED if idle else ExitStatus.DONE
