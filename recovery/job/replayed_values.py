"""Whether replay gives a program again what it was given before."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from understudy.recovery.history.events import validation_failed
from understudy.recovery.planning.facts import FaultKind
from understudy.recovery.state.incidents import Fault, Outcome, told_of
from understudy.recovery.state.jobs import Job

log = structlog.get_logger()


class ReplayedValues:
    """Counts, over one recovery of a job, of the values that were delivered once more."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._before = (0, 0)

    def begin(self) -> None:
        """From here on."""
        self._before = self._so_far()

    def _so_far(self) -> tuple[int, int]:
        logs = [session.log for session in self._job.active_sessions()]
        return sum(log.replies_compared for log in logs), sum(log.replies_different for log in logs)

    def since(self) -> tuple[int, int]:
        """Values compared since the beginning, and how many of them differed."""
        compared, different = self._so_far()
        return compared - self._before[0], different - self._before[1]

    def judge(self, faults: Sequence[Fault], outcome: Outcome) -> None:
        """A replay that gave other values than the program was given is not to be relied on again.

        Values that corrupted state had given are right to differ; a validation has its own verdict.
        """
        corrupted = any(fault.kind is FaultKind.SILENT_CORRUPTION for fault in faults)
        if not outcome.values_different or not outcome.recovered or not faults or corrupted:
            return
        message = (
            f"{outcome.values_different} of {outcome.values_compared} replayed values differ from those "
            "delivered before"
        )
        log.error("the log is not replayable", job=self._job.name, difference=message)
        cause = told_of(faults)[0]
        self._job.history.add(validation_failed(self._job.name, cause.rank, cause.step, message))
        self._job.distrust_replay(message)
