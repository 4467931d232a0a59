"""Servers that ranks had before a recovery: they are ended once nobody needs what they hold."""

from __future__ import annotations

from understudy.recovery.agent_api.server import Server
from understudy.recovery.base.background import all_of
from understudy.recovery.job.placement import Placement
from understudy.recovery.state.jobs import Session


class FormerServers:
    """Lets go of those of one job."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._ending: list[Server] = []
        """Whose memory on a GPU the ranks may need when they go on."""

    def release(self, session: Session) -> None:
        """End the one that the rank had; unless what came after it lacks its state: then it goes on."""
        source = session.source_server
        if source is session.server:  # a round that was interrupted before there was another one
            source.retired = not source.process.running  # of its death nobody was told meanwhile
        elif source is not None and session.lacks_state and self._placement.could_serve(source, session):
            self._retire(session, session.server)
            session.server, session.lacks_state, source.retired = source, False, False
        elif source is not None:
            self._retire(session, source)
        session.source_server = None

    def _retire(self, session: Session, server: Server) -> None:
        self._placement.retire(server)
        if session.on_gpu:
            self._ending.append(server)

    async def emptied(self) -> None:
        """Until all that were released have given back what they had of their GPUs: not for ever."""
        await all_of(self._placement.emptied(server) for server in self._ending)
        self._ending.clear()
