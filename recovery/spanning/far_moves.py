"""Moves to other hosts that somebody wishes though nothing is broken."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from understudy.recovery.base.errors import Refused
from understudy.recovery.job.coordinator import Coordinator
from understudy.recovery.job.undisturbed import undisturbed
from understudy.recovery.migration.places import Place
from understudy.recovery.state.jobs import Job, Session

if TYPE_CHECKING:
    from understudy.recovery.spanning.placement import SpanningPlacement

MOST_TRIES = 3


class FarMoves:
    """Moves ranks of a job that we lead."""

    def __init__(
        self,
        job: Job,
        placement: SpanningPlacement,
        coordinators: Mapping[str, Coordinator],
        carry_out: Callable[[Session, Coordinator], Awaitable[str]],
        note: Callable[[], None],
    ) -> None:
        """`carry_out`: as `PlannedMoves` does it; `note`: that what has changed has consequences."""
        self._job, self._placement = job, placement
        self._coordinators, self._carry_out, self._note = coordinators, carry_out, note

    async def move(self, session: Session, place: Place) -> str:
        """To that host, or any other; a sentence once it is there.  Raises Refused: it is where it was."""
        rank, source = session.rank, self._placement.at(session)
        if session.moving is not None or session.destination_host or session.destination is not None:
            raise Refused(f"rank {rank} is being moved already")
        if not session.relay:
            raise Refused(f"rank {rank} cannot leave host {source}: start the run with proxyrun --migratable")
        host = place.host or self._placement.choose(session)
        if not host:
            raise Refused(f"no other host has a device for rank {rank}")
        if host == source:
            raise Refused(f"rank {rank} is on host {host} already")
        account = ""
        try:
            for _ in range(MOST_TRIES):
                session.destination_host, session.destination_device = host, place.device
                session.declined = ""
                account = await self._try(session)
                if self._placement.at(session) == host:
                    return f"rank {rank} runs on {session.device} of host {host}, was on {source}\n{account}"
                if not session.active:
                    return f"the session of rank {rank} is over"
                if session.declined:
                    break
            raise Refused(f"rank {rank} stays on host {source}: {session.declined or account}")
        finally:
            session.destination_host = session.destination_device = ""
            self._note()

    async def _try(self, session: Session) -> str:
        """What was done, or why nothing was."""
        coordinator = self._coordinators[self._job.name]
        await undisturbed(session, coordinator)
        if not session.active or self._placement.at(session) == session.destination_host:
            return "a recovery brought it there"
        return await self._carry_out(session, coordinator)
