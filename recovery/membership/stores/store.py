"""Keys and values that hosts share: leases, compare-and-swap, watches.  Every call ends within a deadline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass


class ClusterStoreError(RuntimeError):
    """The store cannot do it; its text is a sentence for the user."""


class Unreachable(ClusterStoreError):
    """No answer in time.  A change that was asked for may have been made or not, or may still be made."""


class LeaseEnded(ClusterStoreError):
    """The lease is not there any more, nor are the keys that were under it."""


class Compacted(ClusterStoreError):
    """Changes were missed and cannot be told any more: list anew."""


@dataclass(frozen=True)
class Entry:
    """A key as it is: `revision` of its last change; `lease` 0 if it is under none."""

    key: str
    value: bytes
    revision: int
    lease: int = 0


@dataclass(frozen=True)
class Listing:
    """All entries below a prefix, by key, as of `revision`."""

    entries: tuple[Entry, ...]
    revision: int


@dataclass(frozen=True)
class Put:
    """Write a key; under a lease it goes when that ends."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True)
class Delete:
    """Remove a key, if it is there."""

    key: str


@dataclass(frozen=True)
class DeleteRange:
    """Remove all keys from `first` on, up to `end`, which stays."""

    first: str
    end: str


Change = Put | Delete | DeleteRange


@dataclass(frozen=True)
class Unchanged:
    """Condition: the key's last change is that of `revision`; 0: there is no such key."""

    key: str
    revision: int


@dataclass(frozen=True)
class Event:
    """A change that was made, with `revision`; `entry` None: the key went."""

    key: str
    revision: int
    entry: Entry | None


class ClusterStore(ABC):
    """Linearizable; revisions only grow, and each transaction that changes something has its own."""

    @abstractmethod
    async def get(self, key: str) -> Entry | None:
        """The key as it is now; raises Unreachable."""

    @abstractmethod
    async def list(self, prefix: str) -> Listing:
        """All below a prefix, as of one revision; raises Unreachable, and Compacted: ask again."""

    @abstractmethod
    async def transact(self, conditions: Sequence[Unchanged], changes: Sequence[Change]) -> int:
        """Make all changes if all conditions hold: their revision; else 0, and nothing has changed.

        Raises Unreachable, and LeaseEnded if a key was to be put under a lease that is not there.
        """

    @abstractmethod
    async def grant(self, ttl_s: float) -> int:
        """A new lease, of whole seconds; raises Unreachable."""

    @abstractmethod
    async def keep(self, lease: int) -> float:
        """Begin its time anew: seconds it now has; raises LeaseEnded, Unreachable."""

    @abstractmethod
    async def remaining(self, lease: int) -> tuple[float, float]:
        """(Seconds left, seconds granted); (0, 0) if it has ended; raises Unreachable."""

    @abstractmethod
    async def revoke(self, lease: int) -> None:
        """End it and its keys now; one that has ended is no mistake; raises Unreachable."""

    @abstractmethod
    def watch(self, prefix: str, after: int) -> AsyncGenerator[Event, None]:
        """Every change below a prefix behind revision `after`, in order; raises Compacted, Unreachable."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of connections; leases stay."""

    # ------------------------------------------------------------------ made of the above
    async def put(self, key: str, value: bytes, lease: int = 0) -> int:
        """Write it, whatever it was; raises as `transact`."""
        return await self.transact((), (Put(key, value, lease),))

    async def swap(self, key: str, revision: int, value: bytes, lease: int = 0) -> int:
        """Write it if its last change is that of `revision` (0: it is absent): its new revision, else 0."""
        return await self.transact((Unchanged(key, revision),), (Put(key, value, lease),))

    async def delete(self, key: str) -> None:
        """Remove it, if it is there; raises Unreachable."""
        await self.transact((), (Delete(key),))


def below(prefix: str) -> DeleteRange:
    """All keys that begin so."""
    return DeleteRange(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1))
