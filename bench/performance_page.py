"""docs/reports/performance.md: what `make bench` has measured, beside the aims of the data path.

    .venv/bin/python bench/performance_page.py bench/results/latest.json [bench/results/snapshots.json]

writes the page anew; `make bench` does so itself. What it says of storage is `make bench-snapshots`'s, of the
run that left the second file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import ROOT
from markdown_tables import table

Results = dict[str, Any]
REPORT = ROOT / "docs" / "reports" / "performance.md"
LAUNCH_BOUND = "launch_bound_mlp.py"
RAW, OURS = "raw loop", "understudy"
NOT_MEASURED = "not measured"


def render(results: Results, storage: Results | None) -> str:
    """The page."""
    sections = [_head(results, storage), _aims(results, storage), _steps(results), _recoveries(results)]
    return "\n".join(line for section in sections for line in [*section, ""])


def _head(results: Results, storage: Results | None) -> list[str]:
    lines = [
        "# Performance, as measured",
        "",
        "Written by `make bench` ([how](../../bench/README.md)); not to be edited. What it means, and where "
        "the time goes: [performance.md](../performance.md).",
        f"{_where(results)}; load average {results['load_before']:.1f} before and "
        f"{results['load_after']:.1f} behind it, the run's own included. One thread per process, native and "
        f"proxied runs in turns, {results['effort']['rounds']} rounds with "
        f"{results['effort']['share']:.0%} of a full run's steps; a ratio is the median of the rounds'.",
    ]
    if storage is not None:
        machine = storage["machine"]
        lines.append(
            f"Storage by `make bench-snapshots`: {_where(machine)}, {storage['file_system']}; load average "
            f"{machine['load_before']:.1f} before."
        )
    return lines


def _where(machine: Results) -> str:
    return (
        f"{machine['date']}, commit {machine['commit']} (+: with changes), {machine['cores']} × "
        f"{machine['cpu']}, PyTorch {machine['torch']}"
    )


def _aims(results: Results, storage: Results | None) -> list[str]:
    one_core, two_cores = (_step(results, LAUNCH_BOUND, pinned) for pinned in (True, False))
    recoveries = {row["fault"]: row for row in results["recoveries"]}
    control = results["control"]
    sleeps = one_core["used_per_step"]["proxied"]
    rows = [
        ("launch-bound, all on one core: step, proxied / native", *_ratio(one_core), "≤ 1.20"),
        (
            "… sleeps of the server a step",
            f"{sleeps['server']['sleeps']:.2f}" if sleeps else NOT_MEASURED,
            "",
            "≤ 0.15",
        ),
        ("launch-bound, two cores: step, proxied / native", *_ratio(two_cores), "≤ 0.65"),
        *_of_storage(storage),
        (
            "server killed, 2 ranks on one host, without replay",
            *_milliseconds(recoveries["kill-server"]),
            "≤ 25 ms",
        ),
        ("server killed, one rank alone, without replay", *_milliseconds(results["alone"]), "≤ 10 ms"),
        (
            f"rendezvous of {control['meeting_ranks']} ranks (torch-free processes)",
            f"{control['meeting_s']:.3f} s",
            _spread(control["meetings_s"], "{:.3f}"),
            "≤ 0.15 s",
        ),
        (
            f"one failed collective told by {control['telling_ranks']:,} ranks, processor of the leader",
            f"{control['told_cpu_s']:.2f} s",
            _spread(control["all_told_cpu_s"], "{:.2f}"),
            "≤ 0.5 s",
        ),
    ]
    return ["## Aims", "", *table(("what", "median", "least to most", "aim"), rows)]


def _of_storage(storage: Results | None) -> list[tuple[str, str, str, str]]:
    aims = (("saved", 16, "≥ 90 %"), ("saved", 500, "≥ 95 %"), ("restored", 500, "≥ 90 %"))
    verbs = {"saved": "until durable", "restored": "until read back"}
    found = []
    for what, megabytes, aim in aims:
        name = f"{verbs[what]}, {megabytes} MB: share of the raw loop's speed in the same run"
        turns = [] if storage is None else _shares(storage[what], megabytes)
        if not turns:
            found.append((name, NOT_MEASURED, "", aim))
            continue
        found.append(
            (
                name,
                f"{100 * statistics.median(turns):.0f} %",
                _spread([100 * turn for turn in turns], "{:.0f}") + " %",
                aim,
            )
        )
    return found


def _shares(rows: Sequence[Results], megabytes: int) -> list[float]:
    """Of the raw loop's speed, round by round."""
    turns = {
        row["way"]: [turn["durable_s"] for turn in row["turns"]]
        for row in rows
        if row["way"] in (RAW, OURS) and round(row["bytes"] / 1e6) == megabytes
    }
    return [raw / ours for raw, ours in zip(turns.get(RAW, ()), turns.get(OURS, ()), strict=True)]


def _steps(results: Results) -> list[str]:
    head = (
        "training", "step, proxied / native", "least to most", "ms, proxied and native",
        "processor time, all / native",
        "µs of worker, server, proxyd", "µs natively", "sleeps of server, worker", "records", "log, kB",
    )  # fmt: skip
    rows = []
    for row in results["step_times"]:
        where = "one core" if row["one_core"] else f"{row['ranks']} rank{'s' if row['ranks'] > 1 else ''}"
        rows.append(
            (
                f"`{row['script']}`, {where}",
                *_ratio(row),
                f"{1000 * row['proxied_s']:.2f}, {1000 * row['native_s']:.2f}",
                *_used(row["used_per_step"]),
                str(row["calls_per_step"]),
                f"{row['log_bytes_per_step'] / 1000:.1f}",
            )
        )
    return [
        "## A step",
        "",
        "Processor time and sleeps are of scripts that say their steps, of 65 % of them.",
        "",
        *table(head, rows),
    ]


def _used(used: Results) -> tuple[str, str, str, str]:
    native, proxied = used["native"], used["proxied"]
    if not native or not proxied:
        return ("–", "–", "–", "–")
    ours = {side: 1e6 * proxied[side]["cpu_s"] for side in ("worker", "server", "control")}
    theirs = 1e6 * sum(side["cpu_s"] for side in native.values())
    return (
        f"{sum(ours.values()) / theirs:.3f}",
        ", ".join(f"{each:.0f}" for each in ours.values()),
        f"{theirs:.0f}",
        f"{proxied['server']['sleeps']:.2f}, {proxied['worker']['sleeps']:.2f}",
    )


def _recoveries(results: Results) -> list[str]:
    parts = ("detect_s", "restart_s", "copy_s", "communicators_s", "replay_s", "total_s")
    head = ("ms, median (least to most)", *(part.removesuffix("_s") for part in parts))
    rows = []
    for row, ranks in [*((row, 2) for row in results["recoveries"]), (results["alone"], 1)]:
        cells = [
            f"{1000 * row[part]:.1f} ({_spread([1000 * one[part] for one in row['all']], '{:.1f}')})"
            for part in parts
        ]
        name = f"{row['fault']}, {ranks} rank{'s' if ranks > 1 else ''}, {row['count']} times"
        rows.append((name, *cells))
    return [
        "## Recoveries",
        "",
        "Of `char_gpt.py`, at places spread over the minibatch.",
        "",
        *table(head, rows),
    ]


def _step(results: Results, script: str, pinned: bool) -> Results:
    found: Results = next(
        row for row in results["step_times"] if row["script"] == script and row["one_core"] == pinned
    )
    return found


def _ratio(row: Results) -> tuple[str, str]:
    turns = [ours / theirs for ours, theirs in zip(row["proxied_runs_s"], row["native_runs_s"], strict=True)]
    return f"{row['ratio']:.3f}", _spread(turns, "{:.3f}")


def _milliseconds(row: Results) -> tuple[str, str]:
    times = [1000 * (one["total_s"] - one["replay_s"]) for one in row["all"]]
    return f"{1000 * row['without_replay_s']:.1f} ms", _spread(times, "{:.1f}")


def _spread(values: Sequence[float], how: str) -> str:
    return f"{how.format(min(values))} to {how.format(max(values))}"


def write(results: Results, storage: Path, page: Path = REPORT) -> None:
    """Make the page of `results`, and of what lies in the file `storage` if there is one."""
    kept = json.loads(storage.read_text()) if storage.exists() else None
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render(results, kept))


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    results = ROOT / "bench" / "results"
    parser.add_argument("measured", type=Path, nargs="?", default=results / "latest.json")
    parser.add_argument("storage", type=Path, nargs="?", default=results / "snapshots.json")
    parser.add_argument("--output", type=Path, default=REPORT)
    given = parser.parse_args()
    write(json.loads(given.measured.read_text()), given.storage, given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
