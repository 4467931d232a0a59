"""The store of one host: in proxyd's memory."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from understudy.recovery.membership.stores.store import (
    Change,
    ClusterStore,
    Compacted,
    Delete,
    DeleteRange,
    Entry,
    Event,
    LeaseEnded,
    Listing,
    Put,
    Unchanged,
)

KEPT_EVENTS = 4096
"""How far back a watch may begin."""


@dataclass
class _Lease:
    ttl_s: float
    ends_at: float
    keys: set[str] = field(default_factory=set)


class StoreMachine:
    """Its rules, without clock and waiting: `now` is the caller's, and never runs backwards."""

    def __init__(self) -> None:
        self.revision = 1
        self.events: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self.forgotten = 0
        """The newest revision of which an event was let go."""
        self._entries: dict[str, Entry] = {}
        self._leases: dict[int, _Lease] = {}
        self._granted = 0

    def advance(self, now: float) -> None:
        """End the leases whose time is over, each in a revision of its own, earliest first."""
        over = [(lease.ends_at, number) for number, lease in self._leases.items() if lease.ends_at <= now]
        for _, number in sorted(over):
            self.revoke(number)

    def next_end(self) -> float:
        """When the next lease ends; infinity if none does."""
        return min((lease.ends_at for lease in self._leases.values()), default=math.inf)

    def get(self, key: str) -> Entry | None:
        """As ClusterStore."""
        return self._entries.get(key)

    def list(self, prefix: str) -> Listing:
        """As ClusterStore."""
        found = (entry for key, entry in sorted(self._entries.items()) if key.startswith(prefix))
        return Listing(tuple(found), self.revision)

    def transact(self, conditions: Sequence[Unchanged], changes: Sequence[Change]) -> int:
        """As ClusterStore."""
        for condition in conditions:
            entry = self._entries.get(condition.key)
            if (entry.revision if entry is not None else 0) != condition.revision:
                return 0
        for change in changes:
            if isinstance(change, Put) and change.lease and change.lease not in self._leases:
                raise LeaseEnded(f"lease {change.lease:x} has ended")
        real = [one for change in changes for one in self._one_by_one(change)]
        if not real:
            return self.revision
        self.revision += 1
        for change in real:
            self._drop(change.key)
            if isinstance(change, Put):
                entry = Entry(change.key, change.value, self.revision, change.lease)
                self._entries[change.key] = entry
                if change.lease:
                    self._leases[change.lease].keys.add(change.key)
                self._tell(Event(change.key, self.revision, entry))
            else:
                self._tell(Event(change.key, self.revision, None))
        return self.revision

    def _one_by_one(self, change: Change) -> Iterator[Put | Delete]:
        """What it really changes."""
        if isinstance(change, DeleteRange):
            yield from (Delete(key) for key in sorted(self._entries) if change.first <= key < change.end)
        elif isinstance(change, Put) or change.key in self._entries:
            yield change

    def grant(self, ttl_s: float, now: float) -> int:
        """As ClusterStore."""
        self._granted += 1
        self._leases[self._granted] = _Lease(math.ceil(ttl_s), now + math.ceil(ttl_s))
        return self._granted

    def keep(self, lease: int, now: float) -> float:
        """As ClusterStore."""
        if lease not in self._leases:
            raise LeaseEnded(f"lease {lease:x} has ended")
        self._leases[lease].ends_at = now + self._leases[lease].ttl_s
        return self._leases[lease].ttl_s

    def remaining(self, lease: int, now: float) -> tuple[float, float]:
        """As ClusterStore."""
        known = self._leases.get(lease)
        return (known.ends_at - now, known.ttl_s) if known is not None else (0.0, 0.0)

    def revoke(self, lease: int) -> None:
        """As ClusterStore."""
        ended = self._leases.pop(lease, None)
        if ended is None or not ended.keys:
            return
        self.revision += 1
        for key in sorted(ended.keys):
            del self._entries[key]
            self._tell(Event(key, self.revision, None))

    def after(self, prefix: str, revision: int) -> Sequence[Event]:
        """Events behind `revision`; raises Compacted."""
        if revision < self.forgotten:
            raise Compacted(f"changes up to revision {self.forgotten} are not known any more")
        return [event for event in self.events if event.revision > revision and event.key.startswith(prefix)]

    def _drop(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None and entry.lease:
            self._leases[entry.lease].keys.discard(key)

    def _tell(self, event: Event) -> None:
        if len(self.events) == KEPT_EVENTS:
            self.forgotten = self.events[0].revision
        self.events.append(event)


class EmbeddedStore(ClusterStore):
    """A StoreMachine by the event loop's clock, or another one."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.machine = StoreMachine()
        self._clock = clock or asyncio.get_running_loop().time
        self._changed = asyncio.Condition()

    async def get(self, key: str) -> Entry | None:
        """As ClusterStore."""
        await self._pass_time()
        return self.machine.get(key)

    async def list(self, prefix: str) -> Listing:
        """As ClusterStore."""
        await self._pass_time()
        return self.machine.list(prefix)

    async def transact(self, conditions: Sequence[Unchanged], changes: Sequence[Change]) -> int:
        """As ClusterStore."""
        await self._pass_time()
        revision = self.machine.transact(conditions, changes)
        await self._tell()
        return revision

    async def grant(self, ttl_s: float) -> int:
        """As ClusterStore."""
        await self._pass_time()
        lease = self.machine.grant(ttl_s, self._clock())
        await self._tell()
        return lease

    async def keep(self, lease: int) -> float:
        """As ClusterStore."""
        await self._pass_time()
        return self.machine.keep(lease, self._clock())

    async def remaining(self, lease: int) -> tuple[float, float]:
        """As ClusterStore."""
        await self._pass_time()
        return self.machine.remaining(lease, self._clock())

    async def revoke(self, lease: int) -> None:
        """As ClusterStore."""
        await self._pass_time()
        self.machine.revoke(lease)
        await self._tell()

    async def watch(self, prefix: str, after: int) -> AsyncGenerator[Event, None]:
        """As ClusterStore."""
        while True:
            await self._pass_time()
            events, seen = self.machine.after(prefix, after), self.machine.revision
            for event in events:
                yield event
            after = max(after, seen)
            async with self._changed:
                if self.machine.revision > after:
                    continue
                wait = self.machine.next_end() - self._clock()
                try:
                    # Not wait_for: Python 3.11's forgets a cancellation that comes as its wait ends.
                    async with asyncio.timeout(None if math.isinf(wait) else max(wait, 0) + 0.001):
                        await self._changed.wait()
                except TimeoutError:
                    continue  # a lease is over

    async def close(self) -> None:
        """As ClusterStore."""

    async def _pass_time(self) -> None:
        before = self.machine.revision
        self.machine.advance(self._clock())
        if self.machine.revision != before:
            await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
