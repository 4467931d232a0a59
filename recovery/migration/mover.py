"""proxyd's part of a move: the session outlives its worker's process, and goes on with another one."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
import structlog

from recovery.control import answer, pb, trouble
from recovery.injector import Refused
from recovery.jobs import Session
from recovery.migration.criu import find
from recovery.migration.namespaces import pid_here, pids_of
from recovery.migration.survey import survey, trouble_of_machine
from recovery.processes import Watched

log = structlog.get_logger()

MOVE_S = 1300.0
"""Longer than CRIU may take to dump and to restore (moving.py)."""
TELL_S = 30.0
LARGEST_ANSWER = 1 << 16


async def move_worker(session: Session, criu: str, images: str) -> str:
    """Answers a sentence; raises Refused, and then the worker runs on unless it says otherwise."""
    if session.moving is not None and not session.moving.is_set():
        raise Refused(f"the worker of rank {session.rank} is being moved already")
    if not session.relay:
        raise Refused(
            f"the worker of rank {session.rank} cannot be moved: start the run with proxyrun --migratable"
        )
    found = await asyncio.to_thread(find, Path(criu) if criu else None)
    obstacles = await asyncio.to_thread(survey, session.rank, session.worker.pid)
    if reason := trouble_of_machine(found) or "; ".join(obstacles):
        raise Refused(f"the worker of rank {session.rank} cannot be moved: {reason}")
    assert found is not None
    order = {
        "criu": str(found.path.absolute()),
        "images": images or tempfile.gettempdir(),
        "pid": await asyncio.to_thread(_innermost_pid, session.worker.pid),
    }
    session.moving = asyncio.Event()
    began, before = time.monotonic(), session.worker
    try:
        moved = await asyncio.to_thread(_ask, session.relay, order)
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
        await answer(
            session.server.stub.FollowWorker(
                pb.FollowWorkerRequest(worker=session.worker.message()), timeout=TELL_S
            )
        )
    except grpc.RpcError as problem:  # it matters only once proxyd dies, too
        log.warning("a server was not told of a move", pid=session.server.pid, problem=trouble(problem))


def _innermost_pid(pid: int) -> int:
    """The pid of a process in its own namespace; 0 if it has ended."""
    try:
        return (pids_of(Path(f"/proc/{pid}/status").read_text(encoding="utf-8")) or [0])[-1]
    except OSError:
        return 0


def _ask(relay: str, order: dict[str, Any]) -> dict[str, Any]:
    """One conversation; raises OSError or ValueError."""
    state = os.lstat(relay)
    if not stat.S_ISSOCK(state.st_mode) or state.st_uid != os.geteuid():
        raise ValueError(f"{relay} is no socket of ours")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(MOVE_S)
        connection.connect(relay)
        connection.sendall(json.dumps(order).encode() + b"\n")
        data = b""
        while not data.endswith(b"\n") and len(data) <= LARGEST_ANSWER:
            more = connection.recv(LARGEST_ANSWER)
            if not more:
                break
            data += more
    reply = json.loads(data)
    if not isinstance(reply, dict):
        raise ValueError("it answered with no JSON object")
    return reply
