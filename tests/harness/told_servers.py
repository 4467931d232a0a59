"""Stands in for device servers in what tells them: a method of the stub for each command."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message

from understudy.recovery.agent_api.commands import command_of
from understudy.recovery.agent_api.server import Pace


class Told:
    """What `Server` is to whoever tells it something."""

    host = ""
    pace = Pace()
    stub: Any

    async def execute(self, command: Message, within_s: float | None = None) -> Any:
        known = command_of(command)
        return await getattr(self.stub, known.method)(
            command, known.within_s if within_s is None else within_s
        )
