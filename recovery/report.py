"""The JSON summary of a run (`proxyrun --report FILE`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recovery.drills import Drill

_SPLIT = ("detect_s", "restart_s", "copy_s", "communicators_s", "replay_s", "total_s")


def recovery_entry(recovery: Any) -> dict[str, Any]:
    """One recovery as it stands in the report."""
    entry: dict[str, Any] = {
        name: getattr(recovery, name) for name in ("fault", "rank", "step", "call", "phase", "plan", "reason")
    }
    entry |= {name: round(getattr(recovery, name), 6) for name in _SPLIT}
    return entry | {
        "generation": recovery.generation,
        "copied_bytes": recovery.copied_bytes,
        "recovered": recovery.recovered,
    }


def drill_of(message: Any) -> Drill:
    """A drill as it came over the wire."""
    return Drill(message.kind, message.rank, message.step, message.call)


def summary(report: Any, command: list[str], status: int, wall_s: float) -> dict[str, Any]:
    """Everything worth keeping of a run; numbers of bytes and calls are medians over ranks and steps."""
    return {
        "command": command,
        "exit_status": status,
        "wall_s": round(wall_s, 6),
        "steps": report.steps,
        "calls_per_step": report.calls_per_step,
        "log_bytes_per_step": report.log_bytes_per_step,
        "recoveries": [recovery_entry(recovery) for recovery in report.recoveries],
        "faults": [
            {
                "kind": fault.drill.kind,
                "rank": fault.drill.rank,
                "step": fault.drill.step,
                "call": fault.drill.call,
                "fired": fault.fired,
            }
            for fault in report.faults
        ],
        "replies_compared": report.replies_compared,
        "replies_different": report.replies_different,
        "ranks": [
            {"rank": rank.rank, "device": rank.device, "state": rank.state, "recoveries": rank.recoveries}
            for rank in report.ranks
        ],
    }


def write(path: Path, content: dict[str, Any]) -> None:
    """Write it, readably."""
    path.write_text(json.dumps(content, indent=2) + "\n")
