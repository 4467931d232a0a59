"""Servers that do not get on, and what a server shows of where it stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.collectives import Blocked

if TYPE_CHECKING:
    from simulation.device import Device
    from simulation.log import Log


class Stall:
    """Why a server runs nothing, though it should."""

    def __init__(self) -> None:
        self.hung = False
        """Its record never ends: it sleeps, and answers what needs no executor."""
        self.stopped = False
        """By a signal: it answers nothing."""

    @property
    def stands(self) -> bool:
        """Whether it runs no record."""
        return self.hung or self.stopped


def publish(device: Device, log: Log, waits: Blocked | None = None) -> None:
    """Into the control page; `waits`: for whom it stands still, in a collective."""
    log.cursor_index, log.sealed = device.index, int(device.is_sealed)
    log.step, log.progress_ns = device.steps + 1, device.world.loop.nanoseconds()
    log.in_collective = int(waits is not None)
    log.waits_for = (waits.communicator, 0) if waits is not None else (0, 0)
    log.wait_sequence = waits.sequence if waits is not None else 0
