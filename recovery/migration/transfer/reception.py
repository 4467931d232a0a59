"""What is asked of the host to which a worker is sent: to look at it, to take it in, to restore it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from understudy.recovery.base.control import answer, pb, rpc, trouble
from understudy.recovery.membership.network.links import NoLink
from understudy.recovery.migration.relay.outgoing_workers import ASK_S
from understudy.recovery.migration.transfer.moves import Moves
from understudy.recovery.migration.transfer.stream import Outgoing

SLOWEST = 10e6
"""Bytes a second."""
AT_LEAST_S = 60.0
RESTORE_S = 620.0


class NotSent(Exception):
    """Its text is a sentence; the worker runs on where it was, unless it says otherwise."""


class Reception:
    """Asks one host to take one worker in.  Everything raises NotSent."""

    def __init__(self, moves: Moves, host: str, move: str, who: str) -> None:
        """`who`: as sentences begin, "the worker of rank 1"."""
        self._moves, self._host, self._move, self._who = moves, host, move, who
        self.sent = 0
        """Bytes that went over the network."""

    def _stub(self) -> Any:
        try:
            return rpc.MovesStub(self._moves.channel_to(self._host))
        except NoLink as problem:
            raise NotSent(f"{self._who} was not moved: {problem}") from problem

    async def consider(self, header: pb.WorkerHeader) -> None:
        """Whether it could run there."""
        await self._answered(self._stub().ConsiderWorker(header, timeout=ASK_S, wait_for_ready=True))

    async def take_in(self, header: pb.WorkerHeader, parts: AsyncIterator[pb.WorkerPart]) -> None:
        """All parts, which begin with that header."""
        allowed = AT_LEAST_S + (header.image_bytes + header.log_bytes) / SLOWEST
        outgoing = Outgoing(self._counted(parts))
        try:
            await self._answered(self._stub().ReceiveWorker(aiter(outgoing), timeout=allowed))
        except NotSent:
            if outgoing.problem is not None:
                raise NotSent(f"{self._who} was not moved: {outgoing.problem}") from outgoing.problem
            raise

    async def _counted(self, parts: AsyncIterator[pb.WorkerPart]) -> AsyncIterator[pb.WorkerPart]:
        async for part in parts:
            self.sent += len(part.data.data)
            yield part

    async def restore(self) -> pb.MoveReply:
        """It is there then, and stopped."""
        return await self._answered(self._stub().FinishMove(self._request(), timeout=RESTORE_S))

    async def abandon(self) -> None:
        """It was never let run, and is not wanted."""
        await self._answered(self._stub().AbandonMove(self._request(), timeout=ASK_S))

    def _request(self) -> pb.MoveRequest:
        return pb.MoveRequest(move=self._move)

    async def _answered(self, call: Any) -> pb.MoveReply:
        try:
            reply: pb.MoveReply = await answer(call)
        except grpc.RpcError as problem:
            raise NotSent(
                f"{self._who} was not moved: host {self._host} does not answer: {trouble(problem)}"
            ) from problem
        if reply.error:
            raise NotSent(f"{self._who} was not moved: {reply.error}")
        return reply
