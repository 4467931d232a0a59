"""What a recovery asks of the hosts: devices and device servers for the ranks of its job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from understudy.recovery.agent_api.server import Server
from understudy.recovery.state.jobs import Session


class Placement(Protocol):
    """What is there on one host (`host/placement.py`), or on several (`spanning/placement.py`)."""

    async def ready(self, sessions: list[Session], suspicious: bool) -> None:
        """Until all of these can be steered; `suspicious`: of what is between them."""

    def awaited(self, sessions: Sequence[Session]) -> str:
        """What has to come before all of these can be steered, in a sentence; empty: nothing."""

    def free_devices(self) -> int:
        """That a rank whose own has failed could get."""

    def is_homeless(self, session: Session) -> bool:
        """Whether it needs another device."""

    def fence(self, session: Session, reason: str) -> None:
        """Its device has failed."""

    def retire(self, server: Server) -> None:
        """End it (SIGKILL) and let go of it, without waiting."""

    def fill(self) -> None:
        """Start spares that are missing."""

    async def replacement(self, session: Session, keep_source: bool) -> Server:
        """A ready server in place of the session's, whose process is ended if it is not yet.

        `keep_source`: it lives on until its state has been copied.  Raises NoPlace.
        """

    async def emptied(self, server: Server) -> None:
        """Until a server that is being ended has given back its GPU's memory: not for ever."""

    def could_serve(self, source: Server, session: Session) -> bool:
        """Whether a rank's former server, which has its state, could go on with it."""

    def arrive(self, session: Session) -> None:
        """The rank's new server holds its state."""

    def read_from(self, holder: Server, reader: Session) -> str:
        """The address at which the server of `reader` reads the state that another one holds."""
