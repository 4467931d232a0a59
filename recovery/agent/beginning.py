"""What a rank begins with: its log, and a device server that is told of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import grpc

from understudy import replay
from understudy.recovery.base.control import answer, pb, trouble
from understudy.recovery.config.settings import Settings
from understudy.recovery.job.recovery_round import policy
from understudy.recovery.machine.processes import start_ticks
from understudy.recovery.state.jobs import Session

ATTACH_S = 30.0


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
        return str((await answer(session.server.stub.Attach(request, timeout=ATTACH_S))).error)
    except grpc.RpcError as problem:
        return trouble(problem)
