"""What a simulated server keeps so that it can go back, and lets go of below its job's floor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.log import RING, SEGMENT_RECORDS, Log

if TYPE_CHECKING:
    from simulation.device import Device


class Floor:
    """The oldest commit that a server can go back to."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._commit = 0
        self._index = 0
        """Record from which the log must stay, so that it can rewind."""

    def at(self, commit: int, index: int) -> None:
        """The server begins anew at a commit."""
        self._commit, self._index = commit, index

    def down_to(self, commit: int, index: int) -> None:
        """The server has gone back to a commit."""
        self._commit, self._index = min(self._commit, commit), min(self._index, index)

    def apply(self, log: Log) -> None:
        """Let go of what no commit at or above the job's floor needs."""
        table, snapshots = self._device.table, self._device.snapshots
        newest = table.epoch
        target = min(log.floor_commit, newest) if self._device.protect else newest
        target = max(target, newest - (RING - 4))
        if target > self._commit:
            self._commit = target
            table.release(target)
            self._index = log.entry(target).index
            for commit in log.commits():
                if commit.number < target:
                    commit.readable = False
        snapshots.apply_floor(log)
        keeps_from = min(self._index, snapshots.keeps_log_from(log))
        log.freed_segments = max(log.freed_segments, keeps_from // SEGMENT_RECORDS)
