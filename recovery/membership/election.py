"""One leader at a time for a name, and a token that tells an older leader from a newer one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from understudy.recovery.membership.stores.store import ClusterStore, ClusterStoreError, LeaseEnded, Unchanged

AGAIN_S = 0.5
"""After the store did not answer."""


class Deposed(ClusterStoreError):
    """This leader is none any more, or cannot know: whatever it still wants to do must not be done."""


@dataclass(frozen=True)
class Leadership:
    """The leadership of one candidate, from its election to the end of its lease.

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


async def lead(store: ClusterStore, leadership: Leadership) -> None:
    """Keep the lease until that fails: raises Deposed.

    Our clock may be wrong, so this saves a leader useless work; what keeps it from harm is its token.
    """
    clock = asyncio.get_running_loop().time
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
            await asyncio.sleep(AGAIN_S)
            continue
        await asyncio.sleep(leadership.ttl_s / 3)
