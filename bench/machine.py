"""Where and when a measurement was made."""

import datetime
import importlib.metadata
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def describe_machine() -> dict[str, str | int | float]:
    """Date, commit ("+" = with changes), processor, cores, load before the run, and PyTorch's version."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "torch": importlib.metadata.version("torch"),
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def _commit() -> str:
    commit = _git("rev-parse", "--short", "HEAD") or "unknown"
    return commit + ("+" if _git("status", "--porcelain") else "")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return os.uname().machine
