"""Keeps this host registered: its record, and under a lease the sign that it lives."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import structlog

from understudy.protos import control_pb2 as pb
from understudy.recovery.base.timing import TIMING, Timing
from understudy.recovery.membership.records import BadRecord, Keys, read, written
from understudy.recovery.membership.stores.store import (
    ClusterStore,
    ClusterStoreError,
    Delete,
    LeaseEnded,
    Put,
    Unchanged,
)

log = structlog.get_logger()

LOOK_S = 1.0
"""How often the record is compared with what there is to tell."""


class NameTaken(ClusterStoreError):
    """Another host that lives is registered under our name."""


class Registration:
    """One host's; `trouble` says why it is not registered, if it is not, and since when."""

    def __init__(
        self,
        store: ClusterStore,
        keys: Keys,
        describe: Callable[[], pb.HostRecord],
        wall_clock: Callable[[], float] = time.time,
        timing: Timing = TIMING,
    ) -> None:
        """`describe`: what there is to tell of us now, always under the same name and instance."""
        self._store = store
        self._keys = keys
        self._describe = describe
        self._wall_clock, self._lease_s = wall_clock, timing.lease_s
        self._lease = 0
        self._alive_revision = 0
        self._renewed_at = 0.0
        self._registered: pb.HostRecord | None = None
        self.trouble = ""
        self.trouble_since_ms = 0

    async def register(self) -> None:
        """Anew, under a lease of its own; raises ClusterStoreError, NameTaken among them."""
        mine = self._describe()
        alive = await self._store.get(self._keys.alive(mine.name))
        if alive is not None and alive.value != mine.instance.encode():
            await self._check_predecessor(mine)
        lease = await self._store.grant(self._lease_s)
        done = await self._store.transact(
            [Unchanged(self._keys.alive(mine.name), alive.revision if alive is not None else 0)],
            [
                Put(self._keys.alive(mine.name), mine.instance.encode(), lease),
                Put(self._keys.record(mine.name), written(mine)),
                Delete(self._keys.absent(mine.name)),
            ],
        )
        if not done:
            raise NameTaken(f"another host registers as {mine.name} at the same time")
        self._lease, self._alive_revision, self._registered = lease, done, mine
        self._renewed_at = asyncio.get_running_loop().time()

    async def run(self) -> None:
        """Stay registered, whatever happens to the store."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Renew and tell what has changed, as far as it is time for it."""
        try:
            if self._lease:
                await self._renew()
            if not self._lease:
                await self.register()
        except LeaseEnded:
            self._lease = 0  # anew at the next look
            log.warning("the lease of this host has ended; it registers again")
        except ClusterStoreError as problem:
            self.note_trouble(problem)
        else:
            self._note_success()

    async def leave(self) -> None:
        """A host that is stopped is not lost: nothing of it stays.  Raises ClusterStoreError."""
        if self._lease:
            name = self._describe().name
            await self._store.transact(
                [Unchanged(self._keys.alive(name), self._alive_revision)],
                [Delete(self._keys.alive(name)), Delete(self._keys.record(name))],
            )
            await self._store.revoke(self._lease)

    def note_trouble(self, problem: ClusterStoreError) -> None:
        """We are not registered, or will not be for long."""
        if not self.trouble:
            self.trouble_since_ms = int(self._wall_clock() * 1000)
            log.warning("not registered with the cluster; training goes on", problem=str(problem))
        self.trouble = str(problem)

    async def _renew(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._renewed_at >= self._lease_s / 3 or self.trouble:
            await self._store.keep(self._lease)
            self._renewed_at = now
        mine = self._describe()
        if mine != self._registered:
            sign = Unchanged(self._keys.alive(mine.name), self._alive_revision)
            if not await self._store.transact([sign], [Put(self._keys.record(mine.name), written(mine))]):
                raise LeaseEnded("another proxyd has registered in our place")
            self._registered = mine

    async def _check_predecessor(self, mine: pb.HostRecord) -> None:
        """One before us at our socket, on this machine, is dead: its place is ours.  Raises NameTaken."""
        entry = await self._store.get(self._keys.record(mine.name))
        whose = "its record cannot be read"
        if entry is not None:
            with contextlib.suppress(BadRecord):
                theirs = read(entry.value, pb.HostRecord)
                if (theirs.boot_id, theirs.socket) == (mine.boot_id, mine.socket):
                    return
                whose = f"its proxyd has pid {theirs.node.pid} and the socket {theirs.socket}"
        raise NameTaken(f"a host {mine.name} is registered and alive ({whose}): choose another --host-name")

    def _note_success(self) -> None:
        if self.trouble:
            away_s = round(self._wall_clock() - self.trouble_since_ms / 1000, 1)
            log.info("registered with the cluster again", away_s=away_s)
        self.trouble, self.trouble_since_ms = "", 0
