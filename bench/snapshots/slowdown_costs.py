"""What goodput.py must be told (goodput_costs.py), from what was measured; and the restarts that it needs.

All on one host: no storage is attached anew; until there are devices again is what starting the script
takes.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from restore_measure import drop_cached_pages
from running_proxyd import running_proxyd
from slowdown_measure import BASE, OURS, OURS_NATIVE
from slowdown_plan import Row, by_way
from slowdown_runs import LONGEST_S, SCRIPT, Native
from training_run import RunFailed, Training, execute, installed, under_proxy

from understudy.recovery.costs.given.goodput_costs import Keeping, Persisting

STALLING = {"torch.save", "dcp.save", "GPM"}
CONCURRENT = {"PCcheck": 2, OURS: BASE.slots - 1}
"""Way -> snapshots under way at a time."""
IN_PLACE = "understudy, in place"
STEPS, FAULT_STEP = 12, 6
TINY_STEPS = 300  # which take milliseconds; a snapshot must become durable meanwhile
SAID = "step "


@dataclass(frozen=True)
class Restarts:
    """Of ours, seconds."""

    start_s: float
    """From the command until the script has made its model."""
    load_s: float
    """Exporting the newest snapshot, of which nothing is cached, and loading what was written."""
    replica_s: float
    """From a device server's death until its rank goes on from where it was, with a replica's state."""


def restarts(folder: Path, tiny: bool) -> Restarts:
    """Raises RunFailed, also if the losses after loading are not those of the run that was stopped."""
    arguments = ["--tiny"] if tiny else []
    start_s, load_s = _from_storage(folder / "storage", TINY_STEPS if tiny else STEPS, arguments)
    return Restarts(start_s, load_s, _from_replica(folder / "replica", arguments))


def _from_storage(folder: Path, steps: int, arguments: list[str]) -> tuple[float, float]:
    folder.mkdir(mode=0o700)
    stores, exported = folder / "stores", folder / "exported"
    training = Training(SCRIPT, 1, steps, arguments)
    persisting = ("--persist", str(stores), "--persist-every", "2steps")
    with running_proxyd(folder / "first.sock", 1, persisting, folder / "log") as proxyd:
        before = training.run(folder / "before", proxied=True, options=("--socket", str(proxyd.socket)))
    drop_cached_pages(stores)
    begin_s = time.perf_counter()
    command = [*installed("recoveryctl"), "snapshots", "export", str(stores), str(exported)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    export_s = time.perf_counter() - begin_s
    step = next((int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith(SAID)), None)
    if done.returncode != 0 or step is None:
        raise RunFailed(f"no snapshot could be exported: {done.stdout}{done.stderr}")
    at: dict[str, float] = {}

    def on_line(line: str) -> None:
        at.setdefault(line.strip(), time.perf_counter())

    with running_proxyd(folder / "second.sock", 1, log=folder / "log") as proxyd:
        losses = folder / "losses"
        command = [sys.executable, SCRIPT, "--steps", str(steps - step), "--load", str(exported)]
        command += ["--losses", str(losses), *arguments]
        options = ("--socket", str(proxyd.socket))
        begin_s = time.perf_counter()
        execute(under_proxy(command, 1, folder / "report", options=options), LONGEST_S, on_line)
        after = losses.read_text().split()
    if after != before.losses[0][step:]:
        raise RunFailed(f"a training resumed from its export of step {step} has other losses")
    shutil.rmtree(folder)
    return at["made"] - begin_s, export_s + at["loaded"] - at["made"]


def _from_replica(folder: Path, arguments: list[str]) -> float:
    training = Training(SCRIPT, 2, STEPS, arguments)
    drill = f"kill-server rank=1 step={FAULT_STEP} call=50"
    found = training.run(folder, proxied=True, drills=(drill,)).report["recoveries"]
    shutil.rmtree(folder)
    if len(found) != 1 or not found[0]["recovered"]:
        raise RunFailed(f"a killed device server did not come back from its replica: {found}")
    return float(found[0]["total_s"])


def as_costs(
    rows: Sequence[Row], natives: Mapping[str, Sequence[Native]], ours: Restarts, origin: str
) -> dict[str, Any]:
    """A costs file.  Steps that were faster with snapshots than without (noise) count as equally fast.

    Ours is there twice: with the paper's recovery, which always goes back to a snapshot, and with its own.
    What is taken for its `join_s` was not done in one piece: persisting, starting again with more devices,
    loading.
    """
    found = by_way(rows)
    step_s = statistics.median(
        seconds for runs in natives.values() for one in runs for seconds in one.plain_s
    )
    policies = {
        way: _policy(
            way, found[way], statistics.median(one.load_s for one in runs),
            statistics.median(one.start_s for one in runs),
        )
        for way, runs in natives.items()
    }  # fmt: skip
    policies[OURS] = _policy(OURS, found[OURS_NATIVE], ours.load_s, ours.start_s)
    join_s = policies[OURS]["write_s"] + ours.start_s + ours.load_s
    in_place = {"replica_s": ours.replica_s, "join_s": join_s}
    policies[IN_PLACE] = policies[OURS] | {"in_place": in_place}
    return {"measured": True, "origin": origin, "step_s": step_s, "shards": 1, "policies": policies}


def _policy(way: str, rows: Mapping[int, Row], load_s: float, start_s: float) -> dict[str, Any]:
    persists = (
        Persisting.STALLS if way in STALLING
        else Persisting.CONCURRENT if way in CONCURRENT
        else Persisting.ONE_AT_A_TIME
    )  # fmt: skip
    keeps = Keeping.PEER_MEMORY if way == "Gemini" else Keeping.STORAGE
    slowdown: dict[int, float] = {}
    for _, row in sorted(rows.items()):
        if (interval := kept_interval(row)) is not None:
            slowdown[interval] = max(1.0, row["slowdown"])
    durable_s = [rows[interval]["durable_s"] for interval in sorted(rows) if rows[interval]["durable_s"]]
    if not durable_s:
        raise RunFailed(f"no snapshot of {way} became durable while it was measured")
    # The shortest interval has the most under way at a time, as concurrent ones are to be measured.
    write_s = durable_s[0] if persists is Persisting.CONCURRENT else durable_s[-1]
    return {
        "persists": persists.value, "keeps_in": keeps.value, "in_flight": CONCURRENT.get(way, 1),
        "write_s": write_s, "load_s": load_s, "reattach_s": start_s,
        "slowdown": {str(interval): slowdown[interval] for interval in sorted(slowdown)},
        "in_place": None,
    }  # fmt: skip


def kept_interval(row: Row) -> int | None:
    """Steps from one snapshot to the next that became durable, on average; None if none did."""
    if row["from_interval"] is not None:
        return int(row["interval"])
    return (
        max(row["interval"], round(row["interval"] * row["due"] / row["durable"])) if row["durable"] else None
    )
