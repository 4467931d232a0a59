"""A device server of this host, and our channel to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from understudy.recovery.agent_api.commands import NotDone, command_of
from understudy.recovery.agent_api.server import Server
from understudy.recovery.base.control import answer, asynchronous_channel, ran_out, rpc, trouble
from understudy.recovery.machine.processes import Watched


class LocalServer(Server):
    """Is told over its socket."""

    def __init__(self, process: Watched, socket: Path, device: str, *, data_address: str = "") -> None:
        super().__init__(process, socket, device, data_address=data_address)
        self._channel = asynchronous_channel(socket)
        self._stub = rpc.DeviceServerStub(self._channel)

    async def execute(self, command: Message, within_s: float | None = None) -> Any:
        """As Server."""
        return await self._ask(command, within_s, wait_for_ready=False)

    async def execute_once_ready(self, command: Message) -> Any:
        """Likewise, of one that may not listen yet."""
        return await self._ask(command, None, wait_for_ready=True)

    async def _ask(self, command: Message, within_s: float | None, *, wait_for_ready: bool) -> Any:
        known = command_of(command)
        call = getattr(self._stub, known.method)
        seconds = known.within_s if within_s is None else within_s
        try:
            return await answer(call(command, timeout=seconds, wait_for_ready=wait_for_ready))
        except grpc.RpcError as problem:
            raise NotDone(trouble(problem), late=ran_out(problem)) from problem

    async def close(self) -> None:
        """Let go of channel, pidfd and socket file of a process that ended."""
        await self._channel.close()
        self.process.close()
        self.socket.unlink(missing_ok=True)
