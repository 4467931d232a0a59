"""The cluster's store: its rules are the real ones, the way there is long, and now and then closed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TypeVar

from understudy.recovery.membership.stores.embedded import StoreMachine
from understudy.recovery.membership.stores.store import (
    Change,
    ClusterStore,
    Entry,
    Event,
    Listing,
    Unchanged,
    Unreachable,
)

ASKED_S = 5.0
Value = TypeVar("Value")


class Etcd(ClusterStore):
    """As any host sees it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, chance: random.Random) -> None:
        self._loop, self._chance = loop, chance
        self.machine = StoreMachine()
        self.rough = False
        """Whether an answer may get lost."""
        self.away_until = 0.0

    async def _done(self, work: Callable[[float], Value]) -> Value:
        await asyncio.sleep(self._chance.uniform(0.0005, 0.01))
        now = self._loop.time()
        if now < self.away_until:
            await asyncio.sleep(ASKED_S)
            raise Unreachable("no answer")
        self.machine.advance(now)
        answer = work(now)
        if self.rough and self._chance.random() < 0.02:
            await asyncio.sleep(ASKED_S)
            raise Unreachable("no answer, though it was done")
        await asyncio.sleep(self._chance.uniform(0.0005, 0.01))
        return answer

    async def get(self, key: str) -> Entry | None:
        """As ClusterStore."""
        return await self._done(lambda _: self.machine.get(key))

    async def list(self, prefix: str) -> Listing:
        """As ClusterStore."""
        return await self._done(lambda _: self.machine.list(prefix))

    async def transact(self, conditions: Sequence[Unchanged], changes: Sequence[Change]) -> int:
        """As ClusterStore."""
        return await self._done(lambda _: self.machine.transact(conditions, changes))

    async def grant(self, ttl_s: float) -> int:
        """As ClusterStore."""
        return await self._done(lambda now: self.machine.grant(ttl_s, now))

    async def keep(self, lease: int) -> float:
        """As ClusterStore."""
        return await self._done(lambda now: self.machine.keep(lease, now))

    async def remaining(self, lease: int) -> tuple[float, float]:
        """As ClusterStore."""
        return await self._done(lambda now: self.machine.remaining(lease, now))

    async def revoke(self, lease: int) -> None:
        """As ClusterStore."""
        await self._done(lambda _: self.machine.revoke(lease))

    async def watch(self, prefix: str, after: int) -> AsyncGenerator[Event, None]:
        """Nobody here does."""
        raise NotImplementedError
        yield

    async def close(self) -> None:
        """As ClusterStore."""
