"""docs/reports/suite.md: what a full run of the tests takes, cold and warm.

    python tests/harness/suite_report.py COLD.json WARM.json [--output FILE]

Each is a build/durations.json: of a run in a fresh clone, and of one after that.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from durations import ROOT, FullRun

REPORT = ROOT / "docs" / "reports" / "suite.md"
HEAVIEST = 10


def folder_of(file: str) -> str:
    """Below tests/: what its tests are about."""
    return Path(file).parts[1]


def by_folder(run: FullRun) -> dict[str, float]:
    """Seconds of each."""
    found: dict[str, float] = defaultdict(float)
    for file, seconds in run.files.items():
        found[folder_of(file)] += seconds
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
    cold_folders, warm_folders = map(by_folder, runs)
    folders = sorted(cold_folders.keys() | warm_folders.keys())
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
        "## By folder",
        "",
        "Seconds of tests with their fixtures, all workers together.",
        "",
        *table(
            ["folder", "cold", "warm"],
            ([one, f"{cold_folders.get(one, 0):.0f}", f"{warm_folders.get(one, 0):.0f}"] for one in folders),
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
