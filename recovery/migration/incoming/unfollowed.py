"""Workers that nobody follows: a relay that ended while its own proxyd was dead is known to no successor.

Its directory is gone with it, so what that proxyd had written down of the worker is, too.  Whoever has the
worker asks, and ends it: its launcher does not wait for it any more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import grpc
import grpc.aio
import structlog

from understudy.recovery.base.control import answer, pb, rpc, trouble
from understudy.recovery.membership.network.links import NoLink
from understudy.recovery.migration.incoming.incoming_worker import IncomingWorker

log = structlog.get_logger()

ASK_EVERY_S = 60.0
ASK_S = 10.0


async def relay_has_ended(incoming: IncomingWorker, channel_to: Callable[[str], grpc.aio.Channel]) -> bool:
    """Waits until the worker is gone from here, or its home has said that its relay is."""
    header = incoming.header
    while not await _is_gone_within(incoming, ASK_EVERY_S):
        if incoming.followed:
            continue
        try:
            call = rpc.MovesStub(channel_to(header.home)).LookForRelay(
                pb.RelayRequest(relay=header.relay), timeout=ASK_S
            )
            ended = (await answer(call)).ended
        except (grpc.RpcError, NoLink) as problem:
            text = trouble(problem) if isinstance(problem, grpc.RpcError) else str(problem)
            log.debug("nobody says what became of a relay", host=header.home, problem=text)
            continue
        if ended and not incoming.followed:
            log.warning("a worker is ended, as its relay has ended", job=header.job, rank=header.rank,
                        home=header.home)  # fmt: skip
            return True
    return False


async def _is_gone_within(incoming: IncomingWorker, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await incoming.gone.wait()
    return incoming.gone.is_set()
