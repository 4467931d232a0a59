"""Ranks that stand still for a moment, while it is found out whether they have to go back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import structlog

from understudy.recovery.base.control import answer, pb, trouble
from understudy.recovery.job.recovery_round import RESUME_S
from understudy.recovery.state.jobs import Session

log = structlog.get_logger()

HELD_S = 2.0
"""Seconds until a server must have answered: it looks up at the next record."""


async def hold(sessions: Sequence[Session], generation: int) -> None:
    """No rank ends its program from here on, and nothing that it has begun is broken off.

    Who does not do as it is told is dealt with by whoever parks it, or lets it go.
    """
    await _ask(sessions, lambda stub: stub.Hold(pb.HoldRequest(generation=generation), timeout=HELD_S))


async def let_go(sessions: Sequence[Session], generation: int) -> None:
    """They go on as if nothing had been."""
    await _ask(sessions, lambda stub: stub.LetGo(pb.LetGoRequest(generation=generation), timeout=RESUME_S))


async def _ask(sessions: Sequence[Session], request: Callable[[Any], Any]) -> None:
    async def ask(session: Session) -> None:
        try:
            problem = (await answer(request(session.server.stub))).error
        except grpc.RpcError as failure:
            problem = trouble(failure)
        if problem:
            log.warning("not held, or not let go", rank=session.rank, problem=problem)

    await asyncio.gather(*(ask(session) for session in sessions))
