"""What the leader of a job has its own host do: `job_hosts/leading_host.py`, which needs the leader."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

from understudy.protos import control_pb2 as pb
from understudy.recovery.state.jobs import Session


class OwnHost(Protocol):
    """The host of the leader."""

    def take_remote(self, session: Session) -> None:
        """It has opened."""

    def tell(self, report: pb.FaultReport) -> None:
        """A device server's report, also one of another host."""

    def follow(self, session: Session) -> None:
        """Its server is another one."""

    def note(self) -> None:
        """What has changed has consequences from here on."""

    async def send(self, session: Session, destination: str, keep_source: bool) -> pb.Transfer:
        """The worker of a rank of ours; raises NotMoved."""

    def leaves_here(self, session: Session) -> None:
        """A rank of ours runs elsewhere from here on."""

    def expect(self, session: Session) -> asyncio.Future[tuple[Path, int, str]]:
        """A rank of another host is to come here: directory of its log, pid, relay."""

    def leaves_remote(self, session: Session, directory: Path, pid: int, relay: str) -> None:
        """It has come; raises NotDone and LogError."""
