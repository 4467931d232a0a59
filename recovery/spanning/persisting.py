"""What takes a job's snapshots to storage, on one host or on several."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from understudy.recovery.base.timing import TIMING, Timing
from understudy.recovery.snapshots.persistence import Persistence
from understudy.recovery.snapshots.settings import PersistenceSettings, left_out, on_several_hosts
from understudy.recovery.spanning.interface import JobSpans
from understudy.recovery.state.jobs import Job

log = structlog.get_logger()


def begin_persisting(
    job: Job, settings: PersistenceSettings | None, spans: JobSpans | None, note: Callable[[], None],
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
    persistence = Persistence(job, settings, note, reduced, timing)
    if job.span is not None and spans is not None:
        persistence.parts = spans.parts(job, persistence.writer, persistence.take_now)
    return persistence
