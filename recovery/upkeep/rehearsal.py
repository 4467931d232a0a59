"""The operator's drill: a running job goes back to its snapshot on storage, as if all servers were lost."""

from __future__ import annotations

from understudy.protos import control_pb2 as pb
from understudy.recovery.base.errors import Refused
from understudy.recovery.host.injector import account_of
from understudy.recovery.job.coordinator import Coordinator
from understudy.recovery.planning.facts import FaultKind
from understudy.recovery.snapshots.restore.restorer import NotRestored, check
from understudy.recovery.state.durable import Durable
from understudy.recovery.state.jobs import Job

MOST_CHECKS = 5
"""A newer set may become durable while one is being read."""


async def rehearse(job: Job, coordinator: Coordinator) -> str:
    """Answers what happened.  Raises Refused, and then nothing has.

    The set is read beforehand, while training goes on: a damaged one must not cost the job its servers.
    """
    checked = None
    for _ in range(MOST_CHECKS):
        newest = _newest(job)
        if newest == checked:
            break
        try:
            await check(newest)
        except NotRestored as problem:
            if _newest(job) != newest:  # it made way for a newer one while it was read
                continue
            raise Refused(f"snapshot {newest.serial} is of no use: {problem}") from problem
        checked = newest
    else:
        raise Refused("snapshots become durable faster than they can be read: raise --persist-every")
    before = len(job.recoveries)
    for session in job.active_sessions():
        session.declined = ""
    if reason := coordinator.rehearse_restore():
        raise Refused(reason)

    def outcome() -> pb.Recovery | None:
        new = job.recoveries[before:]
        return next((done for done in new if done.fault == FaultKind.REHEARSAL.value), None)

    def declined() -> str:
        return next((session.declined for session in job.active_sessions() if session.declined), "")

    async with job.changed:
        await job.changed.wait_for(lambda: outcome() is not None or declined() or not job.active_sessions())
    done = outcome()
    if done is None:
        raise Refused(declined() or f"job {job.name} ended before the restore was over")
    return account_of(done)


def _newest(job: Job) -> Durable:
    if job.span is not None and job.span.hosts > 1:
        raise Refused(f"job {job.name} runs on several hosts: export a snapshot and start it again from that")
    sets = [durable for session in job.active_sessions() for durable in session.durable]
    if not sets:
        raise Refused(f"job {job.name} has no snapshot on storage: it needs proxyd --persist, and some steps")
    return max(sets, key=lambda durable: durable.serial)
