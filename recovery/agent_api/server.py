"""A device server as proxyd knows it: its process, our channel to it, and what is held against it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from understudy.recovery.base.control import asynchronous_channel, rpc
from understudy.recovery.machine.processes import Watched
from understudy.recovery.planning.facts import FaultKind


@dataclass(frozen=True)
class Verdict:
    """What the watch found: CLOCK_MONOTONIC nanoseconds, and a sentence.

    `counts`: whether it tells against the record that was being run, or may have been a false alarm.
    """

    kind: FaultKind
    happened_ns: int
    noticed_ns: int
    evidence: str
    counts: bool


def is_gpu(device: str) -> bool:
    """Whether errors come late there, and a server's memory is the device's."""
    return not device.startswith("cpu:")


class Server:
    """One device server process and our channel to it."""

    def __init__(self, process: Watched, socket: Path, device: str) -> None:
        self.process = process
        self.socket = socket
        self.device = device
        self.channel = asynchronous_channel(socket)
        self.stub = rpc.DeviceServerStub(self.channel)
        self.data_address = ""
        """Where device servers of other hosts read its state; empty: nowhere."""
        self.retired = False
        """Its end is our own doing, or known already."""
        self.verdict: Verdict | None = None
        """Why the watch ended it."""
        self.generation = 0
        """In which it was attached."""
        self.failed_at = -1
        """The last record whose call failed on it."""
        self.suspect = False
        """Its driver is not to be trusted any more."""

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    async def close(self) -> None:
        """Let go of channel, pidfd and socket file of a process that ended."""
        await self.channel.close()
        self.process.close()
        self.socket.unlink(missing_ok=True)
