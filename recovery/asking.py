"""Conversations of `recoveryctl` with a proxyd."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer

from understudy.recovery.control import blocking_channel, pb, rpc, trouble
from understudy.recovery.socket_path import default_socket, is_answering

SocketOption = Annotated[Path | None, typer.Option("--socket", help="Of the proxyd.")]
JobOption = Annotated[str, typer.Option("--job", help="Needed if several jobs run.")]


class Failure(RuntimeError):
    """A sentence for the user; exit status 2."""


def ask(socket: Path | None, question: Callable[[Any], Any]) -> Any:
    """One conversation with proxyd; raises Failure."""
    path = (socket or default_socket()).absolute()
    if not is_answering(path):
        raise Failure(
            f"no proxyd answers at {path}: start one with proxyd --devices cpu:2, or name its --socket"
        )
    try:
        with blocking_channel(path) as channel:
            return question(rpc.DaemonStub(channel))
    except grpc.RpcError as problem:
        raise Failure(f"proxyd at {path} did not answer: {trouble(problem)}") from problem


def get_status(socket: Path | None) -> Any:
    """What proxyd knows now."""
    return ask(socket, lambda daemon: daemon.GetStatus(pb.StatusRequest(), timeout=10))


@contextlib.contextmanager
def looking(socket: Path | None) -> Iterator[Callable[[], Any] | None]:
    """Many looks at the status over one channel, each of which raises Failure; None if nobody answers."""
    path = (socket or default_socket()).absolute()
    if not is_answering(path):
        yield None
        return
    with blocking_channel(path) as channel:
        daemon = rpc.DaemonStub(channel)

        def look() -> Any:
            is_answering(path)  # raises, if another user does
            try:
                return daemon.GetStatus(pb.StatusRequest(), timeout=10)
            except grpc.RpcError as problem:
                raise Failure(f"proxyd at {path} did not answer: {trouble(problem)}") from problem

        yield look
