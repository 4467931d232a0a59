"""Inputs of a bill, for tests: the example with times for ours that nobody has measured."""

from __future__ import annotations

from typing import Any

import yaml

from understudy.recovery.costs.given.inputs import Inputs
from understudy.recovery.costs.given.reading import EXAMPLE

OURS = {
    "overhead": 0.001,
    "shadows": True,
    "restart_s": 60.0,
    "detect_s": {"transient": 0.05, "server": 0.05, "driver": 0.05, "device": 0.05, "host": 2.0},
    "recovery_s": {
        "rewind-in-place": 0.1,
        "restart-copy-replay": 2.0,
        "stash-restart-restore": 2.0,
        "restore-snapshot-replay": 10.0,
        "restore-stored-replay": 30.0,
    },
    "images": {"every_s": 600.0, "cost_s": 1.0, "durable_s": 30.0},
    "stored": {"every_s": 1800.0, "cost_s": 1.0, "durable_s": 120.0},
}


def tree(**sections: Any) -> dict[str, Any]:
    """The example's values; a section is changed field by field, None takes it away."""
    made: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text()) | {"ours": OURS}
    made["devices"] = {"spares": 100_000, "repair_hours": 24.0}
    for name, change in sections.items():
        made[name] = None if change is None else (made.get(name) or {}) | change
    return made


def inputs(**sections: Any) -> Inputs:
    """The same, checked."""
    return Inputs.model_validate(tree(**sections))
