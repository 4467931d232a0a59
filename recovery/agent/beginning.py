"""What a rank begins with: nobody in its way, its log, and a device server that is told of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any

import structlog

from understudy import replay
from understudy.protos import control_pb2 as pb
from understudy.recovery.agent.refusals import held
from understudy.recovery.agent_api.commands import NotDone
from understudy.recovery.base.errors import Refused
from understudy.recovery.config.settings import Settings
from understudy.recovery.job.server_steps import policy
from understudy.recovery.machine.processes import start_ticks
from understudy.recovery.state.jobs import Job, Session

log = structlog.get_logger()

CLEANUP_WITHIN = 15.0
"""Seconds a successor waits for the former worker's session to be cleaned up."""


async def is_cleaned_up(former: Session) -> bool:
    """Whether a rank may be opened again: its worker has ended, and its session is over, perhaps just now."""
    if former.worker.running and former.state not in ("ended", "lost"):
        return False
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLEANUP_WITHIN):
            await former.closed.wait()
    return former.closed.is_set()


async def former_gone(holder: Session | None, job: Job, request: Any) -> None:
    """Wait for the cleanup of a session in the way, whose worker has ended or is another program.

    `holder`: who has the device that the worker asks for (an OpenSessionRequest).  Raises Refused.
    """
    for former in {holder, job.sessions.get(request.rank)} - {None}:
        assert former is not None
        if former is holder and former.asked_index != request.device_index:
            continue  # it had to move there; another place is to be found
        plain = not (former.host or former.relay) and former.moving is None
        if plain and former.worker.running and not former.worker.maps(former.directory):
            log.info("the worker has replaced itself", job=former.job.name, rank=former.rank)
            former.worker.has_become_another()
        if not await is_cleaned_up(former):
            raise Refused(held(former, request))


def make_log(directory: Path, request: Any, settings: Settings) -> replay.Log:
    """`request`: OpenSessionRequest.  Raises replay.LogError."""
    replay.create_log(
        str(directory), rank=request.rank, world=request.world, segment_bytes=settings.segment_bytes,
        segment_count=settings.segments_in(directory, request.world),
        dictionary_bytes=settings.dictionary_bytes,
        reply_bytes=settings.reply_bytes, shadow_bytes=settings.shadow_bytes,
        snapshot_bytes=settings.snapshot_bytes if settings.snapshot_overhead else 0,
        proxyd_pid=os.getpid(), proxyd_start_ticks=start_ticks(os.getpid()),
        proxyd_grace_s=round(settings.adoption_grace_s),
    )  # fmt: skip
    return replay.Log(str(directory))


async def attach(session: Session, keeps_optimizer_preimages: bool) -> str:
    """To the server that it has; empty, or what went wrong."""
    request = pb.AttachRequest(
        job=session.job.name, rank=session.rank, world=session.world, threads=session.threads,
        log_directory=str(session.directory), policy=policy(session.world, keeps_optimizer_preimages),
        generation=session.job.generation, from_commit=0, run=True, worker=session.worker.message(),
        token=session.job.token,
    )  # fmt: skip
    try:
        return str((await session.server.execute(request)).error)
    except NotDone as problem:
        return str(problem)
