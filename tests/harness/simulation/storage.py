"""What stands in for storage: sets get there a while after they count, leave memory, and may be damaged."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulation.fabric import Violation
from simulation.programs import mix
from simulation.snapshots import Snapshot
from understudy.recovery.host.evidence import facts_of
from understudy.recovery.snapshots.restore.restorer import NotRestored
from understudy.recovery.state.durable import Durable
from understudy.recovery.state.jobs import Session

if TYPE_CHECKING:
    from simulation.world import World

LONGEST_WRITE, LONGEST_ANSWER, LONGEST_READ = 0.03, 0.03, 0.5
"""Seconds, the most."""


class Storage:
    """As `Persistence`, its writer and `Restorer` with --persist-only.

    The writer's answer takes a while, too.  Stores keep what is there until they hear what counts.
    """

    stays_in_memory = False

    def __init__(self, world: World) -> None:
        self._world = world
        self._chance = random.Random(mix(world.seed, 17))
        self._announced = 0
        self._written: dict[int, dict[int, Snapshot]] = {}
        """Serial -> rank -> what is there; a set that is lost is so for ever."""
        self._under_way: dict[int, dict[int, Snapshot]] = {}
        """Being written, or to be told of."""
        self.restored = 0

    def due(self, sessions: Sequence[Session], now: float, pressed: bool) -> bool:
        """Most sets are taken."""
        return pressed or self._chance.random() < 0.8

    def next_step(self, after: int, sessions: Sequence[Session], now: float) -> None:
        """Time decides."""

    def announce(self, serial: int, step: int | None, sessions: Sequence[Session]) -> None:
        """It is about to be ordered."""
        self._announced = serial

    def offer(self, serial: int, sessions: Sequence[Session], commits: Mapping[int, Any], now: float) -> None:
        """It counts; durable in a while, unless its memory changes before that."""
        if serial != self._announced:
            return
        self._announced = 0
        parts = {
            session.rank: next(s for s in self._world.logs[session.rank].published if s.serial == serial)
            for session in sessions
        }
        self._under_way[serial] = parts
        pause = self._chance.uniform(0.001, LONGEST_WRITE)
        self._world.later(pause, lambda: self._store(serial, parts, sessions))

    def _store(self, serial: int, parts: dict[int, Snapshot], sessions: Sequence[Session]) -> None:
        if self._under_way.get(serial) is parts:
            self._written[serial] = parts
            pause = self._chance.uniform(0.0, LONGEST_ANSWER)
            self._world.later(pause, lambda: self._durable(serial, parts, sessions))

    def _durable(self, serial: int, parts: dict[int, Snapshot], sessions: Sequence[Session]) -> None:
        if self._under_way.get(serial) is not parts:
            return
        del self._under_way[serial]
        for session in sessions:
            log, commit = self._world.logs[session.rank], parts[session.rank].commit
            session.durable = [Durable(serial, Path("/run"), 0, facts_of(commit), commit.log_offset)]  # type: ignore[arg-type]
            log.log_kept_from = commit.index
            log.snapshot_floor = max(log.snapshot_floor, serial + 1)
        for older in [older for older in self._written if older < serial]:
            del self._written[older]
        self._world.stir()

    def break_off(self) -> None:
        """As Restorer.break_off: a writer that is killed answers nothing any more."""
        self._under_way.clear()

    def part(self, rank: int, serial: int) -> Snapshot | None:
        """What a rank could get back."""
        return self._written.get(serial, {}).get(rank)

    async def restore(self, durable: Durable, directories: Mapping[int, Path]) -> int:
        """As Restorer.restore."""
        for rank in directories:
            session = self._world.job.sessions[rank]
            if session.server.process.running:
                raise Violation(f"the memory of rank {rank} is written while its device server lives")
            self._world.logs[rank].published.clear()
        if self._under_way:
            raise Violation("memory is written from which a snapshot is being copied")
        await asyncio.sleep(self._chance.uniform(0.01, LONGEST_READ))
        if self._chance.random() < 0.2:
            self._world.faults["storage: damaged"] += 1
            self._written.pop(durable.serial, None)
        parts = self._written.get(durable.serial)
        if parts is None:
            raise NotRestored("its chunks are damaged")
        for rank in directories:
            self._world.logs[rank].published.append(parts[rank])
        self.restored += 1
        return 0
