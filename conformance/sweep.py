"""`make conformance`: every entry of PyTorch's databases on the virtual device and on the CPU; compares bits.

Two shards run at a time, each under its own proxyrun. Writes conformance/results/latest.json and, for a whole
sweep, docs/conformance.md. Ends with 1 if something differs without a reason in reasons.py, crashes or hangs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import report
import shard
from outcome import UnitResult

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
RESULTS = FOLDER / "results"
BIN = Path(sys.executable).parent
SHARDS_AT_A_TIME = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    shard.add_choice(parser)
    parser.add_argument("--output", type=Path, default=RESULTS / "latest.json")
    parser.add_argument(
        "--update", type=Path, help="results of a whole sweep: take all other entries from there"
    )
    options = parser.parse_args()
    begun = time.monotonic()
    results = sweep(
        ["--only", options.only, "--dtype", options.dtype, "--database", options.database], options.shard
    )
    made_of = commit()
    for result in results:
        result.commit = made_of
    if options.update:
        results = _updated(options.update, results)
    seconds = time.monotonic() - begun
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps([vars(result) for result in results], indent=1) + "\n")
    part = options.only or options.dtype or options.database or options.shard != "1/1"
    whole = bool(options.update) or not part
    summary = report.summarise(results, whole=whole)
    if whole:
        (ROOT / "docs" / "conformance.md").write_text(report.markdown(results, summary))
    sys.stdout.write(report.text(results, summary, seconds))
    return 1 if summary.errors else 0


def commit() -> str:
    """What is checked out here; says so if files differ from it."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty=, changed"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def _updated(earlier: Path, results: list[UnitResult]) -> list[UnitResult]:
    """Results of an earlier sweep, where there are no newer ones."""
    merged = {
        (result.database, result.entry, result.dtype): result
        for result in [*(UnitResult(**row) for row in json.loads(earlier.read_text())), *results]
    }
    return [merged[key] for key in sorted(merged)]


def sweep(choice: list[str], of: str = "1/1") -> list[UnitResult]:
    """Runs the chosen units in parallel shards; raises RuntimeError if one cannot be run."""
    number, count = shard.shard_of(of)
    with tempfile.TemporaryDirectory(prefix="understudy-conformance-") as folder:
        parts = [f"{number + i * count}/{count * SHARDS_AT_A_TIME}" for i in range(SHARDS_AT_A_TIME)]
        return run([[*choice, "--shard", part] for part in parts], Path(folder))


def sweep_units(names: list[str], folder: Path) -> list[UnitResult]:
    """The same for units by name."""
    commands = []
    for i in range(SHARDS_AT_A_TIME):
        file = folder / f"units-{i}"
        file.write_text("\n".join(names[i::SHARDS_AT_A_TIME]))
        commands.append(["--units", str(file)])
    return run(commands, folder)


def run(shards: list[list[str]], folder: Path) -> list[UnitResult]:
    """All of these at a time; what they found, sorted by name. Raises RuntimeError if one cannot be run."""
    outputs = [folder / f"{i}.jsonl" for i in range(len(shards))]
    running = [start(arguments, output) for arguments, output in zip(shards, outputs, strict=True)]
    statuses = [process.wait() for process in running]
    if any(statuses):
        raise RuntimeError(f"shards ended with {statuses}; what they found lies in {folder}")
    results = [UnitResult(**json.loads(line)) for file in outputs for line in file.read_text().splitlines()]
    return sorted(results, key=lambda r: (r.database, r.entry, r.dtype))


def start(arguments: list[str], output: Path) -> subprocess.Popen[bytes]:
    """One shard under its own proxyrun."""
    command = [sys.executable, BIN / "proxyrun", "--devices", "cpu:1", sys.executable, FOLDER / "shard.py"]
    return subprocess.Popen(
        [str(part) for part in [*command, "--output", output, *arguments]],
        env=os.environ | {"OMP_NUM_THREADS": "1", "UNDERSTUDY_STATISTICS": "1", "PYTHONUNBUFFERED": "1"},
    )


if __name__ == "__main__":
    sys.exit(main())
