"""`make simulate`: many seeds on several processes, counted, resumable; `--seed N` explains one."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import recovery
import replay
from simulation.chunks import CHUNK, count, run_chunk, summary
from simulation.run import simulate

DEFAULT_STATE = Path("build/simulate.json")
FULL = 100_000
"""Seeds of a full run, from 0."""
RESULT = Path(__file__).parents[2] / "docs" / "simulation.md"
"""What the last full run without violations counted."""


def explain(seed: int) -> int:
    """One seed, with every line that the coordinator logs."""
    logging.basicConfig(level=logging.DEBUG)
    outcome = simulate(seed, explain=True)
    print(*outcome.violations, sep="\n")
    print(f"{outcome.events} events, {outcome.rounds} rounds, {outcome.seconds:.3f} s")
    return bool(outcome.violations)


def fingerprint() -> str:
    """Of everything that decides how a seed runs: what was done with other code does not count."""
    folders = [Path(__file__).parent, *(Path(package.__path__[0]) for package in (recovery, replay))]
    files = [
        path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix in (".py", ".so")
    ]
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest()


def load(path: Path, code: str) -> list[dict[str, Any]]:
    """Chunks that were done with this code."""
    state = json.loads(path.read_text()) if path.exists() else {}
    if not isinstance(state, dict) or state.get("code") != code:
        return []
    chunks: list[dict[str, Any]] = state["chunks"]
    return chunks


def commit() -> str:
    """The commit that is checked out, and whether the sources differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "recovery", "replay", "tests/simulation")
    return git("rev-parse", "--short", "HEAD") + (" with changes" if changed else "")


def write_result(chunks: list[dict[str, Any]]) -> None:
    """The full run's figures, for the documentation."""
    numbers, plans, faults = (count(chunks, title) for title in ("numbers", "plans", "faults"))
    largest = max(chunk["numbers"]["largest world"] for chunk in chunks)
    chosen = ", ".join(f"{number:,} {name}" for name, number in plans.most_common())
    RESULT.write_text(
        "# The last full run of the fault schedules\n\n"
        "<!-- `make simulate` writes this page when a full run ends without a violation. -->\n\n"
        f"{numbers['schedules']:,} schedules at commit {commit()}, no violation: "
        f"{sum(faults.values()):,} faults, {numbers['rounds']:,} rounds, "
        f"{numbers['validations']:,} minibatches executed twice; plans: {chosen}; "
        f"largest world: {largest} ranks.\n"
        "\nWhat must hold in them: [tests/simulation/README.md](../tests/simulation/README.md).\n"
    )


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="simulate", description=__doc__)
    parser.add_argument("--seed", type=int, help="run and explain this one")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=FULL)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--state", type=Path, default=DEFAULT_STATE, help="what is done; delete it to restart"
    )
    options = parser.parse_args()
    if options.seed is not None:
        return explain(options.seed)
    code = fingerprint()
    chunks = load(options.state, code)
    done = {chunk["first"] for chunk in chunks}
    todo = [n for n in range(options.first, options.first + options.count, CHUNK) if n not in done]
    options.state.parent.mkdir(parents=True, exist_ok=True)
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for number, chunk in enumerate(pool.imap_unordered(run_chunk, todo), 1):
            chunks.append(chunk)
            options.state.write_text(json.dumps({"code": code, "chunks": chunks}))
            for seed, text in chunk["failing"].items():
                print(f"--seed {seed}: {text}", flush=True)
            if number % 50 == 0:
                print(f"{number * CHUNK} of {len(todo) * CHUNK}", file=sys.stderr, flush=True)
    print(summary(chunks))
    failing = any(chunk["failing"] for chunk in chunks)
    if not failing and {chunk["first"] for chunk in chunks} >= set(range(0, FULL, CHUNK)):
        write_result(chunks)
    return failing


if __name__ == "__main__":
    sys.exit(main())
