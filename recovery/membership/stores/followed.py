"""A prefix of the store as it is, held here by a watch."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from understudy.recovery.membership.stores.store import ClusterStore, ClusterStoreError, Compacted, Entry

AGAIN_S = 1.0
"""After the store did not answer."""


class Followed:
    """`entries` below the prefix, by key; `trouble` says why they may be out of date."""

    def __init__(self, store: ClusterStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self.entries: dict[str, Entry] = {}
        self.trouble = "the store has not answered yet"
        self.changed = asyncio.Event()
        """Set whenever something has changed; whoever has looked clears it."""

    async def run(self) -> None:
        """Follow it for ever."""
        while True:
            try:
                await self._follow()
            except Compacted:
                continue  # list anew
            except ClusterStoreError as problem:
                self.trouble = str(problem)
                self.changed.set()
                await asyncio.sleep(AGAIN_S)

    async def _follow(self) -> None:
        listing = await self._store.list(self._prefix)
        self.entries = {entry.key: entry for entry in listing.entries}
        self.trouble = ""
        self.changed.set()
        async with aclosing(self._store.watch(self._prefix, listing.revision)) as events:
            async for event in events:
                if event.entry is None:
                    self.entries.pop(event.key, None)
                else:
                    self.entries[event.key] = event.entry
                self.changed.set()
