"""Requests that must not meet: of those for one rank one at a time, and the newest counts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

Number = tuple[int, int]
"""Of the leadership, and of its request."""


class Outdated(Exception):
    """A newer request has come; its text is a sentence."""


class InTurn:
    """Puts the requests of one job in turn."""

    def __init__(self) -> None:
        self._newest: dict[int, Number] = {}
        self._turns: dict[int, asyncio.Lock] = {}

    @contextlib.asynccontextmanager
    async def turn(self, rank: int, number: Number) -> AsyncIterator[None]:
        """Raises Outdated."""
        if number > self._newest.get(rank, (0, 0)):
            self._newest[rank] = number
        async with self._turns.setdefault(rank, asyncio.Lock()):
            if number != self._newest[rank]:
                raise Outdated(f"a newer request for a device server of rank {rank} has come")
            yield
