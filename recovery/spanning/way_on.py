"""How to go on with a job that a lost host has ended."""

from __future__ import annotations

from understudy.recovery.state.jobs import Job


def way_on(job: Job) -> str:
    """A sentence: the newest set on storage and what it takes, or that there is none."""
    stored = job.span.stored if job.span is not None else None
    if stored is None:
        return (
            "no set of its snapshots on storage is known here (proxyd --persist, recoveryctl snapshots "
            "list): start the job again, from its newest checkpoint"
        )
    store = stored.run.parent.parent
    lost = max([session.log.step for session in job.sessions.values()], default=0) - stored.step
    return (
        f"step {stored.step} is on storage, steps lost since then: {max(0, lost)}; "
        f"`recoveryctl snapshots export {store} OUT --job {job.name}` writes a checkpoint to start the job "
        f"again from (hosts with storage of their own: bring their parts in {stored.run} together first)"
    )
