"""Events of a history, as a proxyd would have written them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from understudy.recovery.history import recorder
from understudy.recovery.history.recorder import Event, Kind, append

T0 = 1_700_000_000_000


def made_up(number: int, **more: Any) -> Event:
    return Event(
        Kind.RECOVERY, f"job-{number % 3}", "server-died", "recovered", recorder.new_id(), number % 2, number,
        0.25, T0 + 1000 * number, more,
    )  # fmt: skip


def written(path: Path, *events: Event) -> Path:
    for event in events:
        append(path, event.line())
    return path
