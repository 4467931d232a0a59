"""Snapshots come from storage back into host memory, where new device servers find them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

import structlog

from understudy.recovery.base.background import all_of
from understudy.recovery.job.stages import RoundFailed
from understudy.recovery.planning.cuts import Place
from understudy.recovery.snapshots.restore.restorer import NotRestored, Restorer
from understudy.recovery.state.durable import Durable
from understudy.recovery.state.jobs import Job, Session

log = structlog.get_logger()

END_S = 10.0
"""How long a server that was killed may take to end, seconds: until then its memory cannot be used."""


class StorageFailed(RoundFailed):
    """A snapshot does not come back; nobody plans with it again."""


async def load_from_storage(
    job: Job, sessions: Collection[Session], places: Mapping[int, Place], restorer: Restorer | None
) -> None:
    """One set after the other.

    Raises RoundFailed; StorageFailed: storage is to blame.
    """
    sets: dict[int, list[tuple[Session, Durable]]] = {}
    for session in sessions:
        durable = next(one for one in session.durable if one.commit.place == places[session.rank])
        sets.setdefault(durable.serial, []).append((session, durable))
    for serial, found in sets.items():
        ranks = [session for session, _ in found]
        await all_of(_make_way(session) for session in ranks)
        try:
            if restorer is None:
                raise NotRestored("proxyd has no storage for snapshots")
            _, durable = found[0]
            await restorer.restore(durable, {session.rank: session.directory for session in ranks})
        except NotRestored as problem:
            raise _refused(job, serial, problem) from problem
        for session in ranks:
            session.log.snapshot_floor = serial
            session.refused_snapshots.discard(serial)


def _refused(job: Job, serial: int, problem: NotRestored) -> StorageFailed:
    """What is left is planned with as if that set had never been."""
    message = f"snapshot {serial} does not come back from storage: {problem}"
    for session in job.sessions.values():
        session.durable = [durable for durable in session.durable if durable.serial != serial]
        session.persist_note = message
    log.error("a stored snapshot is of no use", job=job.name, serial=serial, problem=str(problem))
    return StorageFailed(message)


async def _make_way(session: Session) -> None:
    """End the server of a rank whose memory in the log is about to be written."""
    session.server.retired = session.lacks_state = True
    try:
        await asyncio.wait_for(session.server.process.end(0.0), END_S)
    except TimeoutError:
        raise RoundFailed(f"the device server of rank {session.rank} does not end") from None
