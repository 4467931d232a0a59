"""The way to another host, or to the cluster's store, in virtual time: it loses, holds up and is cut."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol

from simulation.virtual_time import VirtualLoop

from understudy.recovery.membership.stores.embedded import StoreMachine
from understudy.recovery.membership.stores.store import (
    Change,
    ClusterStore,
    ClusterStoreError,
    Entry,
    Event,
    Listing,
    Unchanged,
    Unreachable,
)

TTL_S = 10.0
DEADLINE_S = 2.0


class World(Protocol):
    """Where it leads through."""

    chance: random.Random
    loop: VirtualLoop
    machine: StoreMachine
    rough: bool
    """Whether anything goes wrong."""

    def transact(self, conditions: Sequence[Unchanged], changes: Sequence[Change]) -> int:
        """Of the machine."""


class Link(ClusterStore):
    """One host's; what it asks may arrive late, after it has given up waiting."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.cut = False

    async def through(self, do: Callable[[], Any]) -> Any:
        """Ask somebody else to `do` something; raises Unreachable."""
        loop, chance = self._world.loop, self._world.chance
        if self.cut or (self._world.rough and chance.random() < 0.03):
            await asyncio.sleep(DEADLINE_S)
            raise Unreachable("lost on its way")
        answer: asyncio.Future[Any] = loop.create_future()

        def arrive() -> None:
            try:
                outcome, failed = do(), None
            except ClusterStoreError as problem:
                outcome, failed = None, problem
            if self.cut or (self._world.rough and chance.random() < 0.03):
                return  # the answer is lost
            loop.call_later(self._delay(), reply, outcome, failed)

        def reply(outcome: Any, failed: ClusterStoreError | None) -> None:
            if not answer.done():
                answer.set_exception(failed) if failed is not None else answer.set_result(outcome)

        loop.call_later(self._delay(), arrive)
        try:
            return await asyncio.wait_for(answer, DEADLINE_S)
        except TimeoutError:
            raise Unreachable("no answer") from None

    def _delay(self) -> float:
        chance = self._world.chance
        if self._world.rough and chance.random() < 0.05:
            return chance.uniform(0, 3 * TTL_S)
        return chance.uniform(0.001, 0.05)

    async def store(self, do: Callable[[StoreMachine], Any]) -> Any:
        def with_time() -> Any:
            self._world.machine.advance(self._world.loop.time())
            return do(self._world.machine)

        return await self.through(with_time)

    async def get(self, key: str) -> Entry | None:
        found: Entry | None = await self.store(lambda machine: machine.get(key))
        return found

    async def list(self, prefix: str) -> Listing:
        found: Listing = await self.store(lambda machine: machine.list(prefix))
        return found

    async def transact(self, conditions: Sequence[Unchanged], changes: Sequence[Change]) -> int:
        return int(await self.store(lambda _: self._world.transact(conditions, changes)))

    async def grant(self, ttl_s: float) -> int:
        return int(await self.store(lambda machine: machine.grant(ttl_s, self._world.loop.time())))

    async def keep(self, lease: int) -> float:
        return float(await self.store(lambda machine: machine.keep(lease, self._world.loop.time())))

    async def remaining(self, lease: int) -> tuple[float, float]:
        raise NotImplementedError

    async def revoke(self, lease: int) -> None:
        await self.store(lambda machine: machine.revoke(lease))

    async def watch(self, prefix: str, after: int) -> AsyncGenerator[Event, None]:
        while True:
            for event in await self.store(lambda machine, after=after: machine.after(prefix, after)):  # type: ignore[misc]
                after = max(after, event.revision)
                yield event
            await asyncio.sleep(1)

    async def close(self) -> None: ...
