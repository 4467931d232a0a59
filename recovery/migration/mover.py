"""proxyd's part of a move: the session outlives its worker's process, and goes on with another one."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import structlog

from understudy.protos import control_pb2 as pb
from understudy.recovery.agent_api.commands import NotDone
from understudy.recovery.base.errors import Refused
from understudy.recovery.machine.criu import find
from understudy.recovery.machine.processes import Watched
from understudy.recovery.migration.preflight.survey import lasting_obstacles, trouble_of_machine
from understudy.recovery.migration.process.namespaces import innermost_pid, pid_here
from understudy.recovery.migration.relay.orders import ask_init
from understudy.recovery.migration.worker_state import Event
from understudy.recovery.state.jobs import Session

log = structlog.get_logger()


async def move_worker(session: Session, criu: str, images: str) -> str:
    """Answers a sentence; raises Refused, and then the worker runs on unless it says otherwise."""
    if session.moving is not None and not session.moving.is_set():
        raise Refused(f"the worker of rank {session.rank} is being moved already")
    if not session.relay:
        raise Refused(
            f"the worker of rank {session.rank} cannot be moved: start the run with proxyrun --migratable"
        )
    found = await asyncio.to_thread(find, Path(criu) if criu else None)
    obstacles = await lasting_obstacles(session.rank, session.worker.pid)
    if reason := trouble_of_machine(found) or "; ".join(obstacles):
        raise Refused(f"the worker of rank {session.rank} cannot be moved: {reason}")
    assert found is not None
    order = {
        "do": Event.MOVE.value,
        "criu": str(found.path.absolute()),
        "images": images or tempfile.gettempdir(),
        "pid": await asyncio.to_thread(innermost_pid, session.worker.pid),
    }
    session.moving = asyncio.Event()
    began, before = time.monotonic(), session.worker
    try:
        moved = await asyncio.to_thread(ask_init, session.relay, order)
        if "error" not in moved:
            await _go_on(session, moved)
    except (OSError, ValueError) as problem:
        raise Refused(
            f"the relay of rank {session.rank} does not answer as it should: {problem}"
        ) from problem
    finally:
        session.moving.set()
        session.moving = None
    if "error" in moved:
        raise Refused(f"the worker of rank {session.rank} was not moved: {moved['error']}")
    before.close()
    log.info("a worker was moved", job=session.job.name, rank=session.rank, worker=session.worker.pid,
             former=before.pid, bytes=moved["bytes"])  # fmt: skip
    return (
        f"rank {session.rank}: its worker was moved in {time.monotonic() - began:.3f} s (dump "
        f"{moved['dump_s']:.3f}, checksums {moved['check_s']:.3f}, restore {moved['restore_s']:.3f}; "
        f"{moved['bytes'] / 1e6:.0f} MB of images); it runs as process {session.worker.pid}, was {before.pid}"
    )


async def _go_on(session: Session, moved: dict[str, Any]) -> None:
    """With the process that was restored; raises ValueError or OSError."""
    numbers = ("dump_s", "check_s", "restore_s", "bytes", "pid", "namespace")
    if not all(isinstance(moved.get(name), int | float) for name in numbers):
        raise ValueError("its answer lacks a number")
    pid = await asyncio.to_thread(pid_here, int(moved["pid"]), int(moved["namespace"]))
    if not pid:
        raise ValueError("the restored process is not to be found")
    session.worker = Watched(pid)
    try:
        await session.server.execute(pb.FollowWorkerRequest(worker=session.worker.message()))
    except NotDone as problem:  # it matters only once proxyd dies, too
        log.warning("a server was not told of a move", pid=session.server.pid, problem=str(problem))
