"""What `make bench-jit` measured, as it lies in bench/results/jit.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recovery_parts import Recovery
from steady_cost import Cost, Spread

WAYS = ("jit", "periodic")


@dataclass(frozen=True)
class Results:
    """Times in seconds."""

    machine: Mapping[str, Any]
    """Before the run, and `load_after`."""
    seed: int
    command: str
    setting: Mapping[str, float]
    """Of all jobs: `fault_runs.Setting`."""
    took: float
    recoveries: Mapping[str, Sequence[Recovery]]
    """Of each way."""
    repeated: Sequence[str]
    """Why jobs without `jit` were run once more."""
    losses: int
    """That were compared, each with the same one of the undisturbed run."""
    step: float
    """The median of the undisturbed run."""
    checkpoint: Spread | None
    """How long a periodic checkpoint kept the ranks."""
    steady: Sequence[Cost]

    def write(self, path: Path) -> None:
        """As JSON. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> Results:
        """Raises OSError, ValueError and TypeError for what `write` has not written."""
        fields = json.loads(path.read_text())
        fields["recoveries"] = {
            way: [Recovery(**one) for one in found] for way, found in fields["recoveries"].items()
        }
        fields["checkpoint"] = fields["checkpoint"] and Spread(**fields["checkpoint"])
        fields["steady"] = [Cost(**{**one, "ratio": Spread(**one["ratio"])}) for one in fields["steady"]]
        return cls(**fields)
