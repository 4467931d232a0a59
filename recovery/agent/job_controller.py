"""One job on this host: what recovers it, if this host leads it, or who tells the host that does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from understudy.recovery.agent_api.server import Server
from understudy.recovery.config.settings import Settings
from understudy.recovery.host.leases import Leases
from understudy.recovery.host.placement import HostPlacement
from understudy.recovery.host.servers import ServerPool
from understudy.recovery.job.coordinator import Coordinator
from understudy.recovery.rendezvous.forwarder import StoreForwarder
from understudy.recovery.rendezvous.store import Store
from understudy.recovery.rendezvous.worker_store import WorkerStore
from understudy.recovery.snapshots.restore.restorer import Restorer
from understudy.recovery.spanning.interface import JobSpans, Started
from understudy.recovery.spanning.member.deputy import Deputy
from understudy.recovery.spanning.persisting import begin_persisting
from understudy.recovery.state.jobs import Job, Session
from understudy.recovery.upkeep.floors import FloorKeeper
from understudy.recovery.upkeep.snapshots import SnapshotKeeper
from understudy.recovery.upkeep.validation import ValidationSchedule


@dataclass(frozen=True)
class HostServices:
    """What a job has of its host."""

    settings: Settings
    pool: ServerPool
    leases: Leases
    store: Store
    """Where device servers meet."""
    follow: Callable[[Session], None]
    """Is told of every session that got a new server."""
    note: Callable[[], None]
    """What has changed has consequences from here on."""


class JobController:
    """All that is there of one job on this host; it ends with the job."""

    def __init__(self, job: Job, host: HostServices, spans: JobSpans) -> None:
        """`spans`: this host's part in jobs on several hosts, should the job be one."""
        self.job = job
        self._host = host
        self.spans = spans
        self.coordinator: Coordinator | None = None
        """If this host leads the job."""
        self.deputy: Deputy | None = None
        """If another one does."""
        self.snapshots: SnapshotKeeper | None = None
        self.validations = ValidationSchedule(job, 0)
        self.worker_store: WorkerStore | None = None
        """If it is migratable."""
        self._work: list[asyncio.Task[None]] = []

    @property
    def told(self) -> Coordinator | Deputy | None:
        """Who is told of what happens to the job's ranks here."""
        return self.coordinator or self.deputy

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """For as long as the job lasts."""
        self._work.append(asyncio.create_task(work))

    def keep_store(self, relays: Path) -> None:
        """Opens the job's `torch.distributed` store, for workers below relays there."""
        name, spans = self.job.name, self.spans
        self.worker_store = WorkerStore(
            relays, name, StoreForwarder(spans.where), partial(spans.spans, name),
            partial(spans.settle_store, name),
        )  # fmt: skip
        self.run(self.worker_store.run())

    def follow_leader(self) -> None:
        """Another host leads the job."""
        self.deputy = self.spans.deputy(self.job)

    def lead(self) -> Coordinator:
        """This host leads the job, whether it is new, or another host has led it.

        What has told that host is there until `succeed_leader`.
        """
        job, host = self.job, self._host
        settings, timing = host.settings, host.settings.timing
        placement, lead, images = HostPlacement(host.pool, host.leases), None, None
        if job.span is not None:
            spans = self.spans
            lead, placement, images = spans.begin(job), spans.placement(job), spans.images(job)
        keeps = settings.keeps_optimizer_preimages
        persistence = begin_persisting(job, settings.persist, self.spans, host.note, timing)
        self.coordinator = Coordinator(
            job, placement, keeps, host.follow, host.note, Restorer(persistence),
            partial(self._decided, lead), partial(host.store.forget_generations, job.name), timing,
        )  # fmt: skip
        self.snapshots = SnapshotKeeper(
            job, self.coordinator, settings.snapshot_overhead, persistence, images
        )
        self.validations = ValidationSchedule(job, settings.validate_every, keeps, settings.keeps_snapshots)
        self.run(FloorKeeper(job, self.coordinator, keeps, self.validations, timing).run())
        self.run(self.snapshots.run())
        if persistence is not None:
            self.run(persistence.writer.run())
            if persistence.log_keeping is not None:
                self.run(persistence.log_keeping.run())
            if persistence.mirroring is not None:
                self.run(persistence.mirroring.run())
        if lead is not None:
            lead.start()
        return self.coordinator

    async def _decided(self, lead: Started | None) -> None:
        """Until what is known of the job, and is to be done now, outlives this proxyd, and this host."""
        if lead is not None:
            await lead.settle()
        else:
            self._host.note()

    def succeed_leader(self) -> Deputy:
        """No other host leads the job any more: who has told that host, to be ended."""
        deputy, self.deputy = self.deputy, None
        assert deputy is not None
        return deputy

    async def end(self, deputy: Deputy) -> None:
        """It tells nobody, and keeps nothing for a leader."""
        await deputy.cancel()
        for server in deputy.left_behind.values():
            self.retire(server)

    def retire(self, server: Server) -> None:
        """End a device server of this host."""
        self._host.pool.retire(server)

    async def dismiss(self) -> None:
        """Nobody is told of the job any more."""
        coordinator, self.coordinator = self.coordinator, None
        self.snapshots = None  # whoever is told knows this controller: nothing may be left that has the log
        if coordinator is not None:
            await coordinator.cancel()
        if self.deputy is not None:
            await self.end(self.succeed_leader())

    def stop_work(self) -> None:
        """What has been run for the job."""
        for task in self._work:
            task.cancel()
        self._work.clear()

    def close_store(self) -> None:
        """Nobody of the job asks it any more."""
        store, self.worker_store = self.worker_store, None
        if store is not None:
            store.close()
