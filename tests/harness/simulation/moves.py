"""Planned moves: the real ones, ordered at random times, and what must hold of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from understudy.recovery.base.errors import Refused
from understudy.recovery.config.settings import DeviceSpec, Settings
from understudy.recovery.host.leases import Leases
from understudy.recovery.host.servers import ServerPool
from understudy.recovery.migration.places import Place
from understudy.recovery.upkeep.planned_moves import PlannedMoves
from understudy.recovery.upkeep.snapshots import SnapshotKeeper

if TYPE_CHECKING:
    from simulation.schedules import Move
    from simulation.world import World


class Moves:
    """Of one world, which has more devices than ranks."""

    def __init__(self, world: World, leases: Leases, snapshots: SnapshotKeeper) -> None:
        self._world = world
        self._leases = leases
        name = world.job.name
        settings = Settings(DeviceSpec("cpu", 1), Path("unused"))
        self._moves = PlannedMoves(
            settings, leases, cast(ServerPool, world.pool), {name: world.coordinator}, {name: snapshots},
            spans={}, note=lambda: None,
        )  # fmt: skip
        self.begun = 0
        self.arrived = 0

    async def order(self, move: Move) -> None:
        """One of them, to its end."""
        session = self._world.job.sessions.get(move.rank)
        if session is None or not session.active:
            return
        left = session.device_index
        self.begun += 1
        try:
            if move.drains:
                await self._moves.drain(Place("", self._leases.name(left)))
            else:
                free = self._leases.free()
                await self._moves.migrate(session, Place("", self._leases.name(free[0] if free else left)))
        except Refused:
            stays = session.active and session.device_index == left
            if stays and left in self._leases.draining and not self._moves.is_under_way(session):
                raise self._world.violation(f"rank {move.rank} stays on a device that is drained") from None
        else:
            if session.active and session.device_index == left:
                raise self._world.violation(f"rank {move.rank} is said to have moved, and has not")
            self.arrived += session.device_index != left
        if move.drains and left in self._leases.draining and self._leases.holder(left) is None:
            self._moves.undo(Place("", self._leases.name(left)))

    def check(self) -> None:
        """At the end of a world: whoever is still there has one device, and nothing is kept for nobody."""
        held = [session.device_index for session in self._world.job.sessions.values()]
        if len(set(held)) != len(held):
            raise self._world.violation(f"two ranks have one device: {held}")
        for session in self._world.job.sessions.values():
            if self._leases.holder(session.device_index) is not session:
                raise self._world.violation(f"rank {session.rank} has a device that is not leased to it")
        for index, name in enumerate(vars(self._leases)["_names"]):
            barred = index in self._leases.fenced or index in self._leases.draining
            taken = barred or self._leases.holder(index) is not None
            if taken != (name in self._world.pool.leased):
                raise self._world.violation(
                    f"{name} is {'taken' if taken else 'free'}, and the pool does not know"
                )
