"""Does anything grow with the number of steps? `make leak-test` asks over 10,000 steps.

Looked at are the client's tables and private memory, the device server's private memory (the log in shared
memory has bounds of its own), and the bytes of log per step.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
from training_run import ROOT, RunFailed, under_proxy

WORKLOAD = ROOT / "bench" / "workloads" / "long_run.py"
TABLES = ("templates", "address_blocks", "dictionary_bytes")
MEMORY_SLACK = 4 << 20  # bytes that heaps may move by without a leak
LOG_SLACK = 0.02

Mark = dict[str, Any]


def run(steps: int, timeout_s: float = 600) -> list[Mark]:
    """Train that many steps; what was held at each mark, in order. Raises RunFailed."""
    with tempfile.TemporaryDirectory(prefix="understudy-leak-") as folder:
        command = under_proxy(
            [sys.executable, str(WORKLOAD), "--steps", str(steps)], 1, Path(folder) / "report.json"
        )
        process = subprocess.Popen(
            ["timeout", str(timeout_s), *command],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None
        marks: list[Mark] = []
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if not line.startswith("MARK "):
                continue
            mark = json.loads(line.removeprefix("MARK "))
            marks.append(mark | {"server_private_bytes": _private_bytes_of_servers(process.pid)})
            process.stdin.write("go on\n")
            process.stdin.flush()
        if process.wait() != 0 or not marks:
            end = "".join(lines[-40:])
            raise RunFailed(f"{WORKLOAD.name} ended with status {process.returncode}:\n{end}")
    return marks


def _private_bytes_of_servers(pid: int) -> int:
    """Of all processes below proxyrun but the worker; those of one fork share most of theirs."""
    total = 0
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if WORKLOAD.name in " ".join(process.cmdline()[1:3]):
                continue
            status = Path(f"/proc/{process.pid}/status").read_text()
        except (psutil.NoSuchProcess, FileNotFoundError):
            continue
        total += sum(
            1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")
        )
    return total


def complaints(marks: list[Mark]) -> list[str]:
    """What grew between the first mark and the last."""
    first, middle, last = marks[0], marks[len(marks) // 2], marks[-1]
    found = []
    for table in TABLES:
        if last[table] != first[table]:
            found.append(f"{table} grew from {first[table]} to {last[table]}")
    for memory in ("private_bytes", "server_private_bytes"):
        if last[memory] > first[memory] + MEMORY_SLACK:
            found.append(f"{memory} grew from {first[memory]:,} to {last[memory]:,}")
    early = (middle["log_bytes"] - first["log_bytes"]) / (middle["step"] - first["step"])
    late = (last["log_bytes"] - middle["log_bytes"]) / (last["step"] - middle["step"])
    if abs(late - early) > LOG_SLACK * early:
        found.append(f"a step appended {early:.0f} bytes to the log at first, {late:.0f} later")
    return found


def log_bytes_per_step(marks: list[Mark]) -> float:
    first, last = marks[0], marks[-1]
    return (last["log_bytes"] - first["log_bytes"]) / (last["step"] - first["step"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    arguments = parser.parse_args()
    marks = run(arguments.steps)
    print("  step  client MiB  server MiB  templates  blocks  dictionary B       log B")
    for m in marks:
        print(
            f"{m['step']:6d}  {m['private_bytes'] / 2**20:10.1f}  {m['server_private_bytes'] / 2**20:10.1f}"
            f"  {m['templates']:9d}  {m['address_blocks']:6d}  {m['dictionary_bytes']:12d}"
            f"  {m['log_bytes']:10d}"
        )
    print(f"{log_bytes_per_step(marks):.0f} bytes of log per step")
    grown = complaints(marks)
    for complaint in grown:
        print(f"LEAK: {complaint}")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
