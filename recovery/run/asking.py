"""Conversations of `recoveryctl` with a proxyd."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer

from understudy.recovery.base.control import blocking_channel, pb, rpc, trouble
from understudy.recovery.base.errors import Failure, NobodyAnswers
from understudy.recovery.config.command_line import say
from understudy.recovery.machine.socket_path import default_socket, is_answering
from understudy.recovery.run import embedded

SocketOption = Annotated[
    Path | None,
    typer.Option("--socket", help="Of the proxyd; needed if several answer, and --job does not tell which."),
]
JobOption = Annotated[str, typer.Option("--job", help="Needed if several jobs run.")]


def ask(socket: Path | None, question: Callable[[Any], Any], job: str = "") -> Any:
    """One conversation with the proxyd at `socket`, or the one that has `job`, or the only one.

    Raises NobodyAnswers, Failure.
    """
    path = find(socket, job)
    try:
        with blocking_channel(path) as channel:
            return question(rpc.DaemonStub(channel))
    except grpc.RpcError as problem:
        raise NobodyAnswers(f"proxyd at {path} did not answer: {trouble(problem)}") from problem


def get_status(socket: Path | None, job: str = "") -> Any:
    """What proxyd knows now."""
    return ask(socket, _status, job)


def all_status(socket: Path | None) -> dict[Path, Any]:
    """What all say that answer, by socket: the node's own and those of single runs; raises NobodyAnswers.

    One that hangs, or has just ended, is told of, and keeps nobody from seeing the others.
    """
    if socket is not None or os.environ.get("UNDERSTUDY_SOCKET"):
        path = find(socket)
        return {path: get_status(path)}
    return _statuses(_answering())


def _statuses(paths: list[Path]) -> dict[Path, Any]:
    """What those say that answer; raises NobodyAnswers if none does."""
    found: dict[Path, Any] = {}
    silent: list[NobodyAnswers] = []
    for path in paths:
        try:
            found[path] = get_status(path)
        except NobodyAnswers as problem:
            silent.append(problem)
    if not found:
        raise silent[0]
    for one in silent:
        say("recoveryctl", str(one))
    return found


def find(socket: Path | None, job: str = "") -> Path:
    """The socket of the proxyd that is to be asked; raises NobodyAnswers, Failure."""
    if socket is not None or os.environ.get("UNDERSTUDY_SOCKET"):
        path = (socket or default_socket()).absolute()
        if not is_answering(path):
            raise NobodyAnswers(_nobody_at(path))
        return path
    found = _answering()
    if len(found) == 1:
        return found[0]
    jobs = {path: sorted({rank.job for rank in one.ranks}) for path, one in _statuses(found).items()}
    fitting = [path for path in jobs if job in jobs[path]] if job else [path for path in jobs if jobs[path]]
    if len(fitting) == 1:
        return fitting[0]
    listed = "; ".join(f"{path}: {', '.join(jobs[path]) or 'no job'}" for path in jobs)
    what = f"none of them has job {job}" if job and not fitting else "name one with --job or --socket"
    raise Failure(f"{len(jobs)} proxyds answer, {what} ({listed})")


def _answering() -> list[Path]:
    """Not empty; raises NobodyAnswers."""
    path = default_socket().absolute()
    found = ([path] if is_answering(path) else []) + embedded.answering()
    if not found:
        raise NobodyAnswers(_nobody_at(path))
    return found


def _nobody_at(path: Path) -> str:
    return f"no proxyd answers at {path}: start one with proxyd --devices cpu:2, or name its --socket"


def _status(daemon: Any) -> Any:
    return daemon.GetStatus(pb.StatusRequest(), timeout=10)


@contextlib.contextmanager
def looking(socket: Path | None, job: str = "") -> Iterator[Callable[[], Any] | None]:
    """Many looks at the status over one channel, each of which raises Failure; None if nobody answers."""
    try:
        path = find(socket, job)
    except NobodyAnswers:
        yield None
        return
    with blocking_channel(path) as channel:
        daemon = rpc.DaemonStub(channel)

        def look() -> Any:
            is_answering(path)  # raises, if another user does
            try:
                return _status(daemon)
            except grpc.RpcError as problem:
                raise NobodyAnswers(f"proxyd at {path} did not answer: {trouble(problem)}") from problem

        yield look
