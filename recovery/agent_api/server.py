"""A device server as whoever decides knows it: what it is told, and what is held against it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from understudy.recovery.agent_api.commands import NotDone
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


@dataclass(frozen=True)
class Pace:
    """What the watch of its host knows of a server: CLOCK_MONOTONIC, nanoseconds."""

    quiet_since_ns: int = 0
    stuck_ns: int = 0
    moved_ns: int = 0


def is_gpu(device: str) -> bool:
    """Whether errors come late there, and a server's memory is the device's."""
    return not device.startswith("cpu:")


class Server(ABC):
    """One device server process, of this host or of another."""

    def __init__(
        self, process: Watched, socket: Path, device: str, *, host: str = "", data_address: str = ""
    ) -> None:
        self.process = process
        self.socket = socket
        """On its host."""
        self.device = device
        self.host = host
        """Empty: this one."""
        self.data_address = data_address
        """Where device servers of other hosts read its state; empty: nowhere."""
        self.retired = False
        """Its end is our own doing, or known already."""
        self.verdict: Verdict | None = None
        """Why the watch ended it."""
        self.pace = Pace()
        """As the watch of another host tells of it."""
        self.heard_ns = 0
        """CLOCK_MONOTONIC: when that host last told of anything, if only that nothing is new."""
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

    @abstractmethod
    async def execute(self, command: Message, within_s: float | None = None) -> Any:
        """Have it carry out one of `COMMANDS`, within the seconds that stand there, unless others are given.

        Answers with the command's reply, which may say that it failed; raises NotDone if there is none.
        """

    @abstractmethod
    async def close(self) -> None:
        """Let go of what we have of a process that ended."""


class AbsentServer(Server):
    """In place of the one that a rank does not have yet."""

    def __init__(self, device: str) -> None:
        super().__init__(Watched.gone(0, 0), Path(), device)
        self.retired = True

    async def execute(self, command: Message, within_s: float | None = None) -> Any:
        """Nobody is there to do it."""
        raise NotDone("this rank has no device server yet")

    async def close(self) -> None:
        """There is nothing to let go of."""
