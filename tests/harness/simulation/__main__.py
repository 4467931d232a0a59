"""`make simulate`: many seeds on several processes, counted, resumable; `--seed N` explains one."""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

from simulation.chunks import CHUNK, count, run_chunk, summary
from simulation.many_seeds import Seeds
from simulation.run import simulate
from understudy import recovery, replay

RESULT = Path(__file__).parents[3] / "docs" / "simulation.md"
"""What the last full run without violations counted."""


def explain(seed: int) -> int:
    """One seed, with every line that the coordinator logs."""
    logging.basicConfig(level=logging.DEBUG)
    outcome = simulate(seed, explain=True)
    print(*outcome.violations, sep="\n")
    print(f"{outcome.events} events, {outcome.rounds} rounds, {outcome.seconds:.3f} s")
    return bool(outcome.violations)


def fingerprint(*more: Path) -> str:
    """Of everything that decides how a seed runs: what was done with other code does not count."""
    folders = [Path(__file__).parent, *more, *(Path(package.__path__[0]) for package in (recovery, replay))]
    files = [
        path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix in (".py", ".so")
    ]
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest()


def commit() -> str:
    """The commit that is checked out, and whether the sources differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    changed = git(
        "status", "--porcelain", "--untracked-files=no", "recovery", "replay", "tests/harness/simulation"
    )
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
        "\nWhat must hold in them: "
        "[tests/harness/simulation/README.md](../tests/harness/simulation/README.md).\n"
    )


def main() -> int:
    """The command line."""
    seeds = Seeds("simulate", CHUNK, run_chunk, fingerprint)
    options = seeds.options(__doc__)
    if options.seed is not None:
        return explain(options.seed)
    chunks = seeds.run(options)
    print(summary(chunks))
    failing = any(chunk["failing"] for chunk in chunks)
    if not failing and seeds.is_full(chunks):
        write_result(chunks)
    return failing


if __name__ == "__main__":
    sys.exit(main())
