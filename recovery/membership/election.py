"""One leader at a time for a name, and a token that tells an older leader from a newer one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from recovery.membership.store import (
    ClusterStore,
    ClusterStoreError,
    Compacted,
    LeaseEnded,
    Put,
    Unchanged,
    Unreachable,
)

AGAIN_S = 0.5
"""After the store did not answer."""

Sleep = Callable[[float], Awaitable[None]]


class Deposed(ClusterStoreError):
    """This leader is none any more, or cannot know: whatever it still wants to do must not be done."""


@dataclass(frozen=True)
class Leadership:
    """Of one candidate, from its election to the end of its lease.

    `token`: the revision at which it was elected, so that of a later leader is always greater.
    """

    key: str
    token: int
    lease: int
    ttl_s: float
    elected_at: float
    """By our clock, before the lease was granted."""

    @property
    def holds(self) -> Unchanged:
        """Condition of every transaction that only this leader may make."""
        return Unchanged(self.key, self.token)


async def campaign(
    store: ClusterStore,
    key: str,
    candidate: str,
    ttl_s: float,
    *,
    clock: Callable[[], float] | None = None,
    sleep: Sleep = asyncio.sleep,
) -> Leadership:
    """Wait until we lead; for how long is the caller's business (asyncio.timeout).

    Whoever is cancelled may have been elected in that moment; its lease then ends by itself.
    """
    clock = clock or asyncio.get_running_loop().time
    while True:
        try:
            began = clock()
            lease = await store.grant(ttl_s)
            if token := await _elected(store, key, candidate, lease):
                return Leadership(key, token, lease, ttl_s, began)
            await store.revoke(lease)
            await _vacant(store, key)
        except (Unreachable, LeaseEnded):
            await sleep(AGAIN_S)


async def lead(
    store: ClusterStore,
    leadership: Leadership,
    *,
    clock: Callable[[], float] | None = None,
    sleep: Sleep = asyncio.sleep,
) -> None:
    """Keep the lease until that fails: raises Deposed.

    Our clock may be wrong, so this saves a leader useless work; what keeps it from harm is its token.
    """
    clock = clock or asyncio.get_running_loop().time
    renewed = leadership.elected_at
    while True:
        now = clock()
        if now - renewed >= leadership.ttl_s:
            raise Deposed("the lease of this leader could not be renewed in time")
        try:
            await store.keep(leadership.lease)
            renewed = now
        except LeaseEnded as ended:
            raise Deposed("the lease of this leader has ended") from ended
        except ClusterStoreError:
            await sleep(AGAIN_S)
            continue
        await sleep(leadership.ttl_s / 3)


async def resign(store: ClusterStore, leadership: Leadership) -> None:
    """Make room for another one at once; raises Unreachable."""
    await store.revoke(leadership.lease)


async def _elected(store: ClusterStore, key: str, candidate: str, lease: int) -> int:
    """Our token; 0: another one leads.  Raises Unreachable, LeaseEnded."""
    try:
        return await store.transact([Unchanged(key, 0)], [Put(key, candidate.encode(), lease)])
    except Unreachable:
        entry = await store.get(key)  # it may have been made all the same
        if entry is not None and entry.lease == lease:
            return entry.revision
        raise


async def _vacant(store: ClusterStore, key: str) -> None:
    """Until nobody leads; raises Unreachable."""
    while True:
        listing = await store.list(key)
        if all(entry.key != key for entry in listing.entries):
            return
        try:
            async with aclosing(store.watch(key, listing.revision)) as events:
                async for event in events:
                    if event.key == key and event.entry is None:
                        return
        except Compacted:
            continue
