"""docs/reports/suite.md: what a full run of the tests takes, cold and warm.

    python tests/harness/suite_report.py COLD.json WARM.json [--output FILE]

Each is a build/durations.json: of a run in a fresh clone, and of one after that.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path

from durations import ROOT, FullRun

REPORT = ROOT / "docs" / "reports" / "suite.md"
LAYERS = {
    "static": "bad_input dictionary documented_commands installed_names layers refusals state_names tables"
    " vocabulary",
    "unit": "cost_* crash_consistency leases *_decisions needs planner* retention run_summary"
    " validation_barrier watch",
    "log/executor": "brief_groups copy_list cuts direct_calls executor* fuzz_corpus hostile_log"
    " instruction_counts leaks log mapped_areas old_runs rewind roll_forward roll_forward_[ep]* span_marks"
    " stored_log",
    "simulation": "*_schedules rewind_machine slot_interleavings soak",
    "component": "background certificates commands control daemon_channel doctor goodput journal"
    " link_judgement peer_store membership metrics persistence_parts rendezvous_gate shared_state"
    " slow_greetings snapshot_[bcks]* snapshot_tune* snapshots storage_e*",
    "scripts": "bench_jit compile* conformance* cuda_build data_[rs]* elastic examples gpu hints_* jit_*"
    " libraries library_imports mistakes_* mixed_devices new_shapes parallelism real_scripts "
    "replica_groups sharded_export sparse sweep third_party training* worker* zygotes",
    "cluster/moves": "arriving_worker standby* communicator_* compatible_hosts cpu_images data_*"
    " host* image* jobs_on_hosts lead* membership_store migration_bench moved_worker moving_*"
    " parts_of_hosts persist_on_hosts planned_moves preflight proxyd_hosts relay several_hosts"
    " spanning_losses store_of_two_hosts successions",
    "deploy": "deploy_* install_criu",
    "recovery": "*",
}
"""Of house.md §6.4 -> names of files, without `test_` and `.py`.  The first that fits counts."""
HEAVIEST = 10


def layer_of(file: str) -> str:
    name = Path(file).stem.removeprefix("test_")
    return next(
        layer for layer, patterns in LAYERS.items() if any(fnmatch(name, one) for one in patterns.split())
    )


def by_layer(run: FullRun) -> dict[str, float]:
    """Seconds of each; all that there are, in their order."""
    found = dict.fromkeys(LAYERS, 0.0)
    for file, seconds in run.files.items():
        found[layer_of(file)] += seconds
    return found


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """In Markdown; all columns but the first are numbers."""
    rule = ["---", *("---:" for _ in head[1:])]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]


def minutes(seconds: float) -> str:
    return f"{seconds:.0f} s ({seconds / 60:.1f} min)"


def surroundings(run: FullRun) -> list[str]:
    """What has no unit to compare."""
    machine = run.machine
    return [
        str(machine.get("date", "unknown")), str(machine.get("commit", "unknown")),
        f"{machine.get('cores', '?')} × {machine.get('cpu', 'unknown')}",
        f"{float(machine.get('memory_bytes', 0)) / (1 << 30):.1f} GiB", str(machine.get("torch", "unknown")),
        str(run.workers),
    ]  # fmt: skip


def figures(run: FullRun) -> list[str]:
    cores = float(run.machine.get("cores", 0)) or 1.0
    busy = run.cpu / (run.wall * cores) if run.wall else 0.0
    return [
        minutes(run.wall), minutes(run.cpu), f"{busy:.0%}", str(run.passed), str(run.failed),
        str(sum(run.skips.values())),
    ]  # fmt: skip


def render(cold: FullRun, warm: FullRun) -> str:
    """The page."""
    runs = (cold, warm)
    names = ["date", "commit (+: with changes)", "processor", "memory", "PyTorch", "workers of pytest-xdist"]
    names += ["wall clock", "CPU time", "of all cores", "passed", "failed", "skipped"]
    both = ([*surroundings(run), *figures(run)] for run in runs)
    cold_layers, warm_layers = map(by_layer, runs)
    heavy = sorted(warm.files, key=lambda file: -warm.files[file])[:HEAVIEST]
    wants = sorted(cold.skips.keys() | warm.skips.keys(), key=lambda name: (-warm.skips.get(name, 0), name))
    lines = [
        "# The test suite: what it takes",
        "",
        "Written by `python tests/harness/suite_report.py` from two full runs of `make test`: one in a fresh",
        "clone (cold), and one after that (warm).",
        "",
        *table(["", "cold", "warm"], zip(names, *both, strict=True)),
        "",
        "## By layer",
        "",
        "Seconds of tests with their fixtures, all workers together.",
        "",
        *table(
            ["layer", "cold", "warm"],
            ([layer, f"{cold_layers[layer]:.0f}", f"{warm_layers[layer]:.0f}"] for layer in LAYERS),
        ),
        "",
        f"The {len(heavy)} files that take longest:",
        "",
        *table(
            ["file", "cold", "warm"],
            ([f"`{one}`", f"{cold.files.get(one, 0):.0f}", f"{warm.files[one]:.0f}"] for one in heavy),
        ),
        "",
        "## Skipped, for want of",
        "",
        *(
            table(
                ["", "cold", "warm"],
                ([one, str(cold.skips.get(one, 0)), str(warm.skips.get(one, 0))] for one in wants),
            )
            if wants
            else ["Nothing."]
        ),
    ]
    return "\n".join([*lines, ""])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cold", type=Path, help="build/durations.json of a run in a fresh clone")
    parser.add_argument("warm", type=Path, help="build/durations.json of a run after that")
    parser.add_argument("--output", type=Path, default=REPORT)
    chosen = parser.parse_args(arguments)
    runs = []
    for path in (chosen.cold, chosen.warm):
        try:
            runs.append(FullRun.read(path))
        except (OSError, ValueError, TypeError) as problem:
            print(f"suite_report: {path} is no build/durations.json: {problem}", file=sys.stderr)
            return 2
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    chosen.output.write_text(render(*runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
