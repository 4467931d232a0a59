"""What proxyd was asked to persist, and how."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import replay


@dataclass(frozen=True)
class PersistenceSettings:
    """Where to, how often, and how many at a time."""

    directory: Path
    every_s: float = 30.0
    slots: int = 3
    """N + 1: snapshots under way, and the one that is complete (PCcheck, section 3.1)."""

    @property
    def in_flight(self) -> int:
        """N, within the leases that a log has."""
        return min(self.slots - 1, replay.SNAPSHOT_LEASES)
