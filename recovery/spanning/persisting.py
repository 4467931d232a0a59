"""What takes a job's snapshots to storage, on one host or on several."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import structlog

from understudy.recovery.base.timing import TIMING, Timing
from understudy.recovery.snapshots.persistence import Persistence
from understudy.recovery.snapshots.settings import PersistenceSettings, left_out, on_several_hosts
from understudy.recovery.snapshots.writing.part_writer import PartsWith, here_alone
from understudy.recovery.spanning.interface import JobSpans
from understudy.recovery.state.jobs import Job

log = structlog.get_logger()


def begin_persisting(
    job: Job, settings: PersistenceSettings | None, spans: JobSpans, note: Callable[[], None],
    timing: Timing = TIMING,
) -> Persistence | None:  # fmt: skip
    """Begins it for a job that we lead."""
    if settings is None:
        return None
    reduced = ""
    if job.span is not None and job.span.hosts > 1:
        if options := left_out(settings):
            reduced = f"a job on several hosts has no {' and no '.join(options)}"
            log.warning("not all that was asked for is possible", job=job.name, reason=reduced)
        settings = on_several_hosts(settings)
    parts: PartsWith = here_alone if job.span is None else partial(spans.parts, job)
    return Persistence(job, settings, note, reduced, timing, parts)
