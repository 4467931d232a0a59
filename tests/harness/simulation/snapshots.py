"""Snapshots of a simulated device server, as proxy_server/csrc/snapshots takes and keeps them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from simulation.log import SEGMENT_RECORDS, Commit, Log
from understudy import replay

if TYPE_CHECKING:
    from simulation.device import Device

LONGEST_COPY = 0.05
"""Seconds from a commit until its snapshot is whole, the most."""
NEVER = 1 << 62
"""Behind every record."""


@dataclass(eq=False)
class Snapshot:
    """One snapshot as `replay.Log.snapshots` answers it, and what it holds."""

    serial: int
    commit: Commit
    seconds: float
    contents: list[tuple[int, bytes, bool]]
    """(handle, content, whether it was there)"""


class Snapshots:
    """What one server has published, and the snapshot that it is making."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._making: Snapshot | None = None

    def after_commit(self, log: Log, commit: Commit) -> None:
        """Begin one if it was ordered: it is what the state is now, and whole in a while."""
        serial, step = log.order
        if not log.takes_snapshots or serial <= log.snapshot_begun or step not in (None, commit.step):
            return
        if commit.optimizer:
            return
        self.abandon(log)
        log.snapshot_begun = serial
        contents = [(row[0], row[1], row[3]) for row in self._device.table.rows()]
        copied = replace(commit, complete=True, has_manifest=True, rows=[], shadows={})
        made = Snapshot(serial, copied, 0.001, contents)
        self._making = made
        pause = self._device.chance.uniform(0.0, LONGEST_COPY)
        self._device.world.later(pause, lambda: self._publish(log, made))

    def _publish(self, log: Log, made: Snapshot) -> None:
        if self._making is not made or not self._device.process.running:
            return
        self._making = None
        log.published = [
            kept for kept in log.published if kept.serial == log.snapshot_floor or kept.serial in log.leased
        ]
        log.published.append(made)
        log.published.sort(key=lambda kept: kept.serial)
        self._device.world.stir()

    def abandon(self, log: Log) -> None:
        """The state goes back, or the server is new: an order that was not fulfilled is open again."""
        self._making = None
        settled = max(log.snapshot_floor - 1, 0)
        log.snapshot_begun = max([settled, *(kept.serial for kept in log.published)])

    def apply_floor(self, log: Log) -> None:
        """What is on storage leaves memory."""
        if self._making is None:
            log.published = [
                kept
                for kept in log.published
                if kept.serial >= log.snapshot_floor or kept.serial in log.leased
            ]

    def of(self, log: Log, number: int) -> Snapshot:
        """The newest of a commit; raises replay.LogError."""
        found = [kept for kept in log.published if kept.commit.number == number]
        if not found:
            raise replay.LogError(f"there is no snapshot of commit {number}")
        return found[-1]

    def holds(self, log: Log, number: int) -> bool:
        """Whether there is one of that commit, which the log knows."""
        index = log.entry(number).index
        return any((kept.commit.number, kept.commit.index) == (number, index) for kept in log.published)

    def keeps_log_from(self, log: Log) -> int:
        """Record from which the log must stay for the sake of a snapshot."""
        if not log.takes_snapshots:
            return NEVER
        if log.snapshot_floor == 0 and log.freed_segments == 0:
            return 0
        needed = [kept.commit.index for kept in log.published if kept.serial >= log.snapshot_floor]
        if self._making is not None:
            needed.append(self._making.commit.index)
        if log.log_kept_from and log.log_kept_from // SEGMENT_RECORDS >= log.freed_segments:
            needed.append(log.log_kept_from)
        return min(needed, default=NEVER)
