"""`make bench`: what the proxy costs and how fast it recovers, as a table and as JSON. See README.md."""

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import control_cost
import copy_rate
import instructions
import leak
import performance_page
import processor_use
import protection_cost
import recovery_cost
import snapshot_cost
from machine import describe_machine
from processor_use import Sides
from rich.console import Console
from rich.table import Table
from training_run import ROOT, Outcome, RunFailed, Training, execute, under_proxy

from understudy.recovery.text.tables import make_console

Results = dict[str, Any]


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int
    share: float  # of the steps in TRAININGS
    bursts: int
    repeats: int
    drills: int  # of each kind
    copies: int
    leak_steps: int


FULL = Effort(rounds=3, share=1, bursts=500, repeats=20, drills=12, copies=10, leak_steps=2000)
BRIEF = Effort(rounds=3, share=1 / 3, bursts=200, repeats=10, drills=10, copies=6, leak_steps=1000)
QUICK = Effort(rounds=1, share=0.2, bursts=50, repeats=4, drills=2, copies=2, leak_steps=200)

WORKLOADS = "bench/workloads/"
TRAININGS = [
    Training("char_gpt.py", 1, 40, ["--log-every", "1000"]),
    Training("char_gpt.py", 2, 40, ["--log-every", "1000"]),
    Training("char_gpt.py", 1, 30, ["--log-every", "1000"], pinned=True),
    Training("digits_convnet.py", 1, 150, ["--log-every", "1000"]),
    Training("digits_convnet.py", 2, 150, ["--log-every", "1000"]),
    Training(WORKLOADS + "resnet18_cifar.py", 1, 16),
    Training(WORKLOADS + "launch_bound_mlp.py", 1, 4000),
    Training(WORKLOADS + "launch_bound_mlp.py", 1, 4000, pinned=True),
    Training(WORKLOADS + "changing_shapes.py", 1, 200),
]


def step_times(effort: Effort, folder: Path, console: Console) -> list[Results]:
    """Native and proxied runs in turns; medians."""
    results = []
    for number, full in enumerate(TRAININGS):
        training = replace(full, steps=max(10, round(full.steps * effort.share)))
        native, proxied, reports = [], [], []
        used: dict[str, list[Sides]] = {"native": [], "proxied": []}
        for turn in range(effort.rounds):
            with console.status(f"{row_name(training)}, round {turn + 1} of {effort.rounds}"):
                place = folder / f"{number}-{turn}"
                outcome, sides = measured(training, Path(f"{place}-native"), proxied=False)
                native.append(outcome.step_seconds)
                used["native"].append(sides)
                outcome, sides = measured(training, Path(f"{place}-proxied"), proxied=True)
                proxied.append(outcome.step_seconds)
                used["proxied"].append(sides)
                reports.append(outcome.report)
        results.append(
            {
                "script": Path(training.script).name,
                "ranks": training.ranks,
                "one_core": training.pinned,
                "native_s": statistics.median(native),
                "proxied_s": statistics.median(proxied),
                "ratio": statistics.median(p / n for p, n in zip(proxied, native, strict=True)),
                "native_runs_s": native,
                "proxied_runs_s": proxied,
                "calls_per_step": reports[-1]["calls_per_step"],
                "log_bytes_per_step": reports[-1]["log_bytes_per_step"],
                "used_per_step": {way: processor_use.medians(turns) for way, turns in used.items()},
            }
        )
    return results


def measured(training: Training, folder: Path, *, proxied: bool) -> tuple[Outcome, Sides]:
    """One run, and what each side took of the processor for a step of it."""
    meter = processor_use.Meter(training.script, training.steps)
    outcome = training.run(folder, proxied=proxied, on_step=meter.on_step)
    return outcome, meter.per_step()


def row_name(training: Training) -> str:
    where = "one core" if training.pinned else f"ranks {training.ranks}"
    return f"{Path(training.script).name}, {where}"


def memory_over_steps(steps: int) -> Results:
    """What a long run holds at its marks, and what grew."""
    marks = leak.run(steps)
    return {
        "marks": marks,
        "log_bytes_per_step": leak.log_bytes_per_step(marks),
        "grown": leak.complaints(marks),
    }


def instruction_counts() -> Results:
    """Instructions of the client per call, or why they could not be counted."""
    if (why := instructions.obstacle()) is not None:
        return {"obstacle": why, "calls": {}}
    return {
        "obstacle": None,
        "calls": {name: asdict(cost) for name, cost in instructions.measure().items()},
    }


def workload(name: str, folder: Path, *options: str) -> Results:
    """What a script of workloads/ measured under the proxy."""
    command = [sys.executable, str(ROOT / "bench" / "workloads" / name), *options]
    output = execute(under_proxy(command, 1, folder / f"{name}.json"), timeout_s=300)
    for line in output.splitlines():
        if line.startswith("RESULT "):
            result: Results = json.loads(line.removeprefix("RESULT "))
            return result
    raise RunFailed(f"{name} printed no result:\n{output}")


def table_of(results: Results) -> Table:
    table = Table(title=f"understudy {results['commit']}, PyTorch {results['torch']}, {results['cpu']}")
    table.add_column("what")
    table.add_column("measured", justify="right")
    table.add_column("")
    for row in results["step_times"]:
        table.add_row(
            f"{row['script']}, {'one core' if row['one_core'] else 'ranks ' + str(row['ranks'])}",
            f"{row['ratio']:.3f} x",
            f"proxied {1000 * row['proxied_s']:.2f}, native {1000 * row['native_s']:.2f} ms; "
            f"{row['calls_per_step']} records, {row['log_bytes_per_step'] / 1000:.1f} kB a step",
        )
        for what in processor_use.rows(row["used_per_step"]):
            table.add_row(*what)
    for what in (*snapshot_cost.rows(results["snapshots"]), *protection_cost.rows(results["protection"])):
        table.add_row(*what)
    table.add_section()
    calls, transfer = results["calls"], results["transfer"]
    table.add_row("one call from Python", f"{calls['call_ns']:.0f} ns", "a + b on 16 x 16")
    table.add_row("calls, executed", f"{calls['calls_per_s']:,.0f} /s", "a + b on 4 elements")
    for name, stages in results["stages"].items():
        parts = ", ".join(f"{stage} {ns:.0f}" for stage, ns in stages.items() if stage != "client")
        table.add_row(f"client: {name}", f"{stages['client']:.0f} ns", parts)
    item = results["item"]
    table.add_row("item(), busy", f"{item['busy_us']:.2f} us", "")
    table.add_row("item(), idle before", f"{item['after_idling_us']:.1f} us", f"{item['idle_ms']:.0f} ms")
    table.add_row("host to device, pinned", f"{transfer['pinned_gb_per_s']:.2f} GB/s", "64 MiB payloads")
    table.add_row("host to device, pageable", f"{transfer['pageable_gb_per_s']:.2f} GB/s", "")
    table.add_section()
    counts = results["instructions"]
    for name, cost in counts["calls"].items():
        heap = f"{cost['allocations']:.1f} requests to the heap"
        table.add_row(f"instructions: {name}", f"{cost['instructions']:.0f}", heap)
    if counts["obstacle"]:
        table.add_row("instructions", "-", counts["obstacle"])
    memory = results["memory"]
    first, last = memory["marks"][0], memory["marks"][-1]
    table.add_row(
        "client memory over steps",
        f"{(last['private_bytes'] - first['private_bytes']) / 1024:+.0f} KiB",
        f"steps {first['step']} to {last['step']}; {memory['log_bytes_per_step']:.0f} bytes of log a step",
    )
    table.add_section()
    alone = results["alone"]
    table.add_row(
        "kill-server, one rank alone", f"{1000 * alone['without_replay_s']:.1f} ms", "without replay"
    )
    for what in (
        *recovery_cost.rows(results["recoveries"]),
        *copy_rate.rows(results["copy"]),
        *control_cost.rows(results["control"]),
    ):
        table.add_row(*what)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--brief", action="store_true", help="a third of the steps")
    length.add_argument("--quick", action="store_true", help="a smoke run: the numbers mean little")
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "latest.json")
    arguments = parser.parse_args()
    effort = QUICK if arguments.quick else BRIEF if arguments.brief else FULL
    console = make_console()
    try:
        with tempfile.TemporaryDirectory(prefix="understudy-bench-") as name:
            folder = Path(name)
            results: Results = describe_machine() | {"effort": asdict(effort)}
            results["step_times"] = step_times(effort, folder, console)
            with console.status("snapshots on and off"):
                results["snapshots"] = snapshot_cost.costs(effort.rounds, effort.share, folder)
            with console.status("snapshots, shadows and validation on and off"):
                results["protection"] = protection_cost.costs(effort.rounds, effort.share, folder)
            with console.status("cost of a call"):
                results["calls"] = workload("call_cost.py", folder, "--bursts", str(effort.bursts))
            with console.status("stages of a call, item()"):
                results["stages"] = workload("call_stages.py", folder, "--bursts", str(effort.bursts // 5))
                results["item"] = workload("item_latency.py", folder, "--bursts", str(effort.bursts // 10))
            with console.status("instructions per call"):
                results["instructions"] = instruction_counts()
            with console.status("memory over many steps"):
                results["memory"] = memory_over_steps(effort.leak_steps)
            with console.status("host to device"):
                results["transfer"] = workload("transfer_rate.py", folder, "--repeats", str(effort.repeats))
            with console.status("recovery"):
                calls = {row["ranks"]: row["calls_per_step"] for row in results["step_times"]
                         if row["script"] == recovery_cost.SCRIPT and not row["one_core"]}  # fmt: skip
                results["recoveries"] = recovery_cost.measure(effort.drills, calls[2], folder)
                results["alone"] = recovery_cost.alone(effort.drills, calls[1], folder)
            with console.status("state copied to a new device server"):
                results["copy"] = copy_rate.measure(effort.copies, folder)
            with console.status("many ranks"):
                results["control"] = control_cost.measure(effort.rounds)
            results["load_after"] = os.getloadavg()[0]
    except RunFailed as failure:
        console.print(failure, style="red", markup=False, highlight=False)
        return 1
    console.print(table_of(results))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(results, indent=2) + "\n")
    console.print(f"written to {arguments.output}")
    if not arguments.quick:
        performance_page.write(results, arguments.output.with_name("snapshots.json"))
        console.print(f"written to {performance_page.REPORT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
