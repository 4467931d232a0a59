"""Ranks that stand still for a moment, while it is found out whether they have to go back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog
from google.protobuf.message import Message

from understudy.protos import control_pb2 as pb
from understudy.recovery.agent_api.commands import NotDone
from understudy.recovery.state.jobs import Session

log = structlog.get_logger()


async def hold(sessions: Sequence[Session], generation: int) -> None:
    """No rank ends its program from here on, and nothing that it has begun is broken off.

    Who does not do as it is told is dealt with by whoever parks it, or lets it go.
    """
    await _tell(sessions, pb.HoldRequest(generation=generation))


async def let_go(sessions: Sequence[Session], generation: int) -> None:
    """They go on as if nothing had been."""
    await _tell(sessions, pb.LetGoRequest(generation=generation))


async def _tell(sessions: Sequence[Session], command: Message) -> None:
    async def tell(session: Session) -> None:
        try:
            problem = (await session.server.execute(command)).error
        except NotDone as failure:
            problem = str(failure)
        if problem:
            log.warning("not held, or not let go", rank=session.rank, problem=problem)

    await asyncio.gather(*(tell(session) for session in sessions))
