"""Lasting connections to other hosts' proxyds, by name: TLS, and the certificate must be that of the name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from understudy.protos import control_pb2 as pb
from understudy.protos.lasting_channels import LASTING
from understudy.recovery.membership.network.certificates import Credentials

LARGEST_MESSAGE = 8 << 20
"""Bytes."""
OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", LARGEST_MESSAGE),
    ("grpc.max_send_message_length", LARGEST_MESSAGE),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 3000),  # so long a connection gets, at least: TLS on a busy machine
    ("grpc.max_reconnect_backoff_ms", 2000),
    *LASTING,
]


class NoLink(RuntimeError):
    """There is no way to ask that host; its text is a sentence."""


class Links:
    """The connections of one proxyd."""

    def __init__(self, known: Callable[[str], pb.HostRecord | None], credentials: Credentials | None) -> None:
        """`known`: what is registered of a host."""
        self._known = known
        self._secret = None
        if credentials is not None:
            self._secret = grpc.ssl_channel_credentials(
                credentials.authority, credentials.key, credentials.certificate
            )
        self._channels: dict[str, tuple[str, grpc.aio.Channel]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def to(self, name: str) -> grpc.aio.Channel:
        """The channel to a host, where it listens now; raises NoLink."""
        record = self._known(name)
        if self._secret is None:
            raise NoLink("this proxyd has no --listen, so it cannot ask other hosts")
        if record is None:
            raise NoLink(f"no host {name} is registered")
        if not record.address:
            raise NoLink(f"host {name} has no --listen, so it cannot be asked")
        place, channel = self._channels.get(name, ("", None))
        if channel is None or place != record.address:
            if channel is not None:
                self._close(channel)
            options = [*OPTIONS, ("grpc.ssl_target_name_override", name)]
            channel = grpc.aio.secure_channel(record.address, self._secret, options=options)
            self._channels[name] = record.address, channel
        return channel

    def _close(self, channel: grpc.aio.Channel) -> None:
        task = asyncio.ensure_future(channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """All of them."""
        for _, channel in self._channels.values():
            await channel.close()
        self._channels.clear()
        await asyncio.gather(*self._closing)


def caller(context: Any) -> str:
    """The host whose certificate the caller has shown; empty: none."""
    names = context.auth_context().get("x509_common_name", [])
    return names[0].decode(errors="replace") if len(names) == 1 else ""
