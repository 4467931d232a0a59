"""`make bench`: what the proxy costs and how fast it recovers, as a table and as JSON. See README.md."""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import describe_machine
from rich.console import Console
from rich.table import Table
from training_run import BIN, ROOT, RunFailed, Training, execute, under_proxy

PARTS = ("detect_s", "restart_s", "copy_s", "communicators_s", "replay_s", "total_s")
Results = dict[str, Any]


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int
    steps: dict[str, int]
    bursts: int
    repeats: int
    drills: int


FULL = Effort(rounds=5, steps={"char_gpt.py": 40, "digits_convnet.py": 150}, bursts=500, repeats=20, drills=6)
QUICK = Effort(rounds=1, steps={"char_gpt.py": 12, "digits_convnet.py": 20}, bursts=50, repeats=4, drills=2)


def step_times(effort: Effort, folder: Path, console: Console) -> list[Results]:
    """Native and proxied runs in turns, for each example and number of ranks."""
    results = []
    for script, steps in effort.steps.items():
        for ranks in (1, 2):
            native, proxied, reports = [], [], []
            for turn in range(effort.rounds):
                with console.status(f"{script}, ranks {ranks}, round {turn + 1} of {effort.rounds}"):
                    training = Training(script, ranks, steps, ["--log-every", str(steps)])
                    place = folder / f"{script}-{ranks}-{turn}"
                    native.append(training.run(Path(f"{place}-native"), proxied=False).step_seconds)
                    outcome = training.run(Path(f"{place}-proxied"), proxied=True)
                    proxied.append(outcome.step_seconds)
                    reports.append(outcome.report)
            results.append(
                {
                    "script": script,
                    "ranks": ranks,
                    "native_s": statistics.median(native),
                    "proxied_s": statistics.median(proxied),
                    "ratio": statistics.median(p / n for p, n in zip(proxied, native, strict=True)),
                    "native_runs_s": native,
                    "proxied_runs_s": proxied,
                    "calls_per_step": reports[-1]["calls_per_step"],
                    "log_bytes_per_step": reports[-1]["log_bytes_per_step"],
                }
            )
    return results


def workload(name: str, folder: Path, *options: str) -> Results:
    """What a script of workloads/ measured under the proxy."""
    command = [str(BIN / "python"), str(ROOT / "bench" / "workloads" / name), *options]
    output = execute(under_proxy(command, 1, folder / f"{name}.json"), timeout_s=300)
    for line in output.splitlines():
        if line.startswith("RESULT "):
            result: Results = json.loads(line.removeprefix("RESULT "))
            return result
    raise RunFailed(f"{name} printed no result:\n{output}")


def recoveries(effort: Effort, calls_per_step: int, folder: Path) -> Results:
    """Several kills in one run of two ranks, at places spread over the minibatch; the median of each part."""
    every = 6
    drills = tuple(
        f"kill-server rank={i % 2} step={every * (i + 1)} "
        f"call={max(1, calls_per_step * (i + 1) // (effort.drills + 1))}"
        for i in range(effort.drills)
    )
    training = Training("char_gpt.py", 2, every * (effort.drills + 1))
    found = training.run(folder / "drills", proxied=True, drills=drills).report["recoveries"]
    if not found:
        raise RunFailed("the run with drills reports no recovery")
    medians = {part: statistics.median(entry[part] for entry in found) for part in PARTS}
    without_replay = statistics.median(entry["total_s"] - entry["replay_s"] for entry in found)
    return {"drills": len(drills), **medians, "total_without_replay_s": without_replay, "all": found}


def table_of(results: Results) -> Table:
    table = Table(title=f"understudy {results['commit']}, PyTorch {results['torch']}, {results['cpu']}")
    table.add_column("what")
    table.add_column("measured", justify="right")
    table.add_column("")
    for row in results["step_times"]:
        table.add_row(
            f"{row['script']}, ranks {row['ranks']}",
            f"{row['ratio']:.3f} x",
            f"proxied {1000 * row['proxied_s']:.1f}, native {1000 * row['native_s']:.1f} ms",
        )
    table.add_section()
    calls, transfer, recovery = results["calls"], results["transfer"], results["recovery"]
    table.add_row("one call from Python", f"{calls['call_ns']:.0f} ns", "a + b on 16 x 16")
    table.add_row("calls, executed", f"{calls['calls_per_s']:,.0f} /s", "")
    table.add_row("host to device, pinned", f"{transfer['pinned_gb_per_s']:.2f} GB/s", "64 MiB payloads")
    table.add_row("host to device, pageable", f"{transfer['pageable_gb_per_s']:.2f} GB/s", "")
    table.add_section()
    for part in (*PARTS, "total_without_replay_s"):
        name = part.removesuffix("_s").replace("_", " ").replace("total without", "total -")
        table.add_row(f"recovery: {name}", f"{1000 * recovery[part]:.1f} ms", "")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run: the numbers mean little")
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "latest.json")
    arguments = parser.parse_args()
    effort = QUICK if arguments.quick else FULL
    console = Console()
    try:
        with tempfile.TemporaryDirectory(prefix="understudy-bench-") as name:
            folder = Path(name)
            results: Results = describe_machine() | {"quick": arguments.quick}
            results["step_times"] = step_times(effort, folder, console)
            with console.status("cost of a call"):
                results["calls"] = workload("call_cost.py", folder, "--bursts", str(effort.bursts))
            with console.status("host to device"):
                results["transfer"] = workload("transfer_rate.py", folder, "--repeats", str(effort.repeats))
            with console.status("recovery"):
                gpt = next(
                    r for r in results["step_times"] if r["script"] == "char_gpt.py" and r["ranks"] == 2
                )
                results["recovery"] = recoveries(effort, gpt["calls_per_step"], folder)
    except RunFailed as failure:
        console.print(failure, style="red", markup=False, highlight=False)
        return 1
    console.print(table_of(results))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(results, indent=2) + "\n")
    console.print(f"written to {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
