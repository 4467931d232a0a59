"""The control plane's messages and channels (docs/protocol.md)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # a server that ends is no news to us

import grpc
import grpc.aio

from understudy.protos import control_pb2 as pb
from understudy.protos import services as rpc

__all__ = [
    "OPTIONS",
    "ChannelClosed",
    "address",
    "answer",
    "asynchronous_channel",
    "blocking_channel",
    "pb",
    "ran_out",
    "rpc",
    "trouble",
]

Value = TypeVar("Value")

OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_receive_message_length", 64 << 20),
    # A server that just started is asked until it answers; the default first pause is a second.
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.min_reconnect_backoff_ms", 20_000),  # the least time that a connection gets to be made
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


def address(socket: str | Path) -> str:
    """A socket's path as gRPC names it."""
    return f"unix:{socket}"


def asynchronous_channel(socket: str | Path) -> grpc.aio.Channel:
    """For proxyd."""
    return grpc.aio.insecure_channel(address(socket), options=OPTIONS)


def blocking_channel(socket: str | Path) -> grpc.Channel:
    """For command lines."""
    return grpc.insecure_channel(address(socket), options=OPTIONS)


class ChannelClosed(grpc.RpcError):  # type: ignore[misc]
    """The channel to a server was closed while it was asked."""


async def answer(call: Awaitable[Value]) -> Value:
    """What a server answers; raises grpc.RpcError.

    grpc.aio cancels whoever waits on a channel that is closed; a task that nobody cancelled must not end as
    if somebody had.
    """
    try:
        return await call
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise ChannelClosed("its channel was closed") from None


def code_of(problem: grpc.RpcError) -> grpc.StatusCode | None:
    """How a call failed; None: nothing was called."""
    code: grpc.StatusCode | None = getattr(problem, "code", lambda: None)()
    return code


def ran_out(problem: grpc.RpcError) -> bool:
    """Whether a call failed because no answer came in time."""
    return code_of(problem) is grpc.StatusCode.DEADLINE_EXCEEDED


def trouble(problem: grpc.RpcError) -> str:
    """A failed call in a few words."""
    details = getattr(problem, "details", lambda: None)()
    return str(details or code_of(problem) or problem)
