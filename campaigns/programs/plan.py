"""What a run's processes are told: one JSON file, written by the runner before it starts them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NAME = "plan.json"


@dataclass(frozen=True)
class PlannedFault:
    """A fault that a process brings upon itself; `native`: a name of faults.Native."""

    step: int
    rank: int
    native: str
    place: float


@dataclass(frozen=True)
class Plan:
    """Times in seconds. `store`: where checkpoints go, on a disk or in memory."""

    data: str
    model: str
    steps: int
    global_batch: int
    seed: int
    keeps: str
    checkpoint_every: int
    max_in_flight: int
    folder: str
    store: str
    device: str
    collective_timeout: float
    faults: Sequence[PlannedFault] = ()
    text: str = ""
    mnist: str = ""

    def write(self) -> Path:
        """Into its folder."""
        path = Path(self.folder) / NAME
        path.write_text(json.dumps(asdict(self), indent=1))
        return path

    @classmethod
    def read(cls, path: Path) -> Plan:
        fields: dict[str, Any] = json.loads(path.read_text())
        fields["faults"] = tuple(PlannedFault(**one) for one in fields["faults"])
        return cls(**fields)
