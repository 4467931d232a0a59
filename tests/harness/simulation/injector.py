"""Faults of a schedule, carried out: at a record, at an instant, or at a request that reaches a server."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from simulation.schedules import STALLS, Fault
from simulation.stalls import publish

if TYPE_CHECKING:
    from simulation.device import Device
    from simulation.world import World


class Injector:
    """Carries out the faults of one schedule."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.traps: dict[int, dict[int, list[Fault]]] = {}
        """Of each rank: what waits at which record."""
        self.calls: Counter[str] = Counter()
        self.own_failures: Counter[tuple[int, int]] = Counter()
        """How often each record of each rank failed by itself."""
        self.meddles = True
        """Whether requests fail."""

    def arrange(self, fault: Fault) -> None:
        """It is to come up when its time has come."""
        if fault.record >= 0:
            self.traps.setdefault(fault.rank, {}).setdefault(fault.record, []).append(fault)
        elif fault.call == "":
            self._world.later(fault.at, lambda: self._strike(fault))

    def spring(self, device: Device, index: int) -> bool:
        """A fault that waits at a record; whether the device must not go on."""
        waiting = self.traps[device.rank][index]
        fault = waiting.pop(0)
        if not waiting:
            del self.traps[device.rank][index]
        self._world.faults[fault.kind] += 1
        self.own_failures[device.rank, index] += 1
        if fault.kind == "kill":
            device.kill()
            return True
        if fault.kind in STALLS:
            return self._stall(device, fault)
        if fault.kind in ("call-error", "driver-suspect"):
            suspect = fault.kind == "driver-suspect"
            device.fail(partial(self._world.call_failed, suspect=suspect, index=index))
            return True
        records = self._world.logs[device.rank].program.records
        if records[index][0] in (8, 9, 10) and device.generation >= 0:
            device.index = index
            device.collective_failed("Connection reset by peer")
            return True
        return False

    def _stall(self, device: Device, fault: Fault) -> bool:
        """It hangs at that record; or is stopped, for good or for a while; or the collective never ends."""
        if fault.kind == "stuck":
            device.collectives.stick = True
            return False
        device.stall.hung, device.stall.stopped = fault.kind == "hang", fault.kind == "stop"
        if fault.kind == "stop" and fault.lasts:
            self._world.later(fault.lasts, partial(self._continue, device))
        publish(device, self._world.logs[device.rank])
        return True

    def _continue(self, device: Device) -> None:
        device.stall.stopped = False
        device.go_on()

    def kill(self, device: Device) -> None:
        """A server dies where it stands."""
        if device.log is not None:
            self.own_failures[device.rank, device.index] += 1
        device.kill()

    def _strike(self, fault: Fault) -> None:
        world = self._world
        session = world.job.sessions.get(fault.rank)
        if fault.kind == "kill-spare":
            if world.pool.ready:
                world.faults[fault.kind] += 1
                world.pool.ready[0].kill()
        elif fault.kind == "outage":
            world.faults[fault.kind] += 1
            world.pool.outage_until = world.loop.time() + fault.lasts
        elif session is None:
            return
        elif fault.kind == "leave":
            world.faults[fault.kind] += 1
            world.worker_ended(fault.rank)
        elif fault.kind == "kill":
            world.faults[fault.kind] += 1
            self.kill(world.device_of(session))

    def meddle(self, device: Device, call: str) -> str:
        """What shall go wrong with a request that reaches a server now."""
        world = self._world
        if not self.meddles:
            return ""
        self.calls[call] += 1
        world.request_arrives(call, self.calls[call])
        for fault in world.schedule.faults:
            if fault.call == call and fault.nth == self.calls[call]:
                world.faults[f"{call}: {fault.kind}"] += 1
                if fault.kind == "kill-before":
                    self.kill(device)
                elif fault.kind == "kill-other" and (other := world.job.sessions.get(fault.rank)) is not None:
                    self.kill(world.device_of(other))
                return fault.kind
        return ""
