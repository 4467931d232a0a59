"""Waits until a rank is left alone by recoveries, as a move that somebody wishes has to."""

from __future__ import annotations

import asyncio
import contextlib

from understudy.recovery.job.coordinator import Coordinator
from understudy.recovery.state.jobs import Session

LOOK_S = 0.01


async def undisturbed(session: Session, coordinator: Coordinator) -> None:
    """Until no recovery is under way, or the session is over."""
    while coordinator.recovering and session.active:
        with contextlib.suppress(Exception):  # it has told of its trouble
            await coordinator.finish()
        await asyncio.sleep(LOOK_S)
