"""`make simulate-jobs`: many seeds on several processes, counted, resumable; `--seed N` explains one."""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path

from simulation.__main__ import fingerprint
from simulation.chunks import summary
from simulation.many_seeds import Seeds

from job_simulation.chunks import CHUNK, run_chunk
from job_simulation.run import simulate


def explain(seed: int) -> int:
    """One seed, with every line that proxyds log."""
    logging.basicConfig(level=logging.DEBUG)
    outcome = simulate(seed, explain=True)
    print(*outcome.violations, sep="\n")
    print(f"{outcome.came_back} came back from images", *outcome.faults.items())
    print(f"{outcome.events} events, {outcome.rounds} rounds, {outcome.virtual_s:.0f} s")
    return bool(outcome.violations)


def main() -> int:
    """The command line."""
    folder = Path(__file__).parent
    code = partial(fingerprint, folder, folder.parent / "hosts_simulation")
    seeds = Seeds("simulate-jobs", CHUNK, run_chunk, code)
    options = seeds.options(__doc__)
    if options.seed is not None:
        return explain(options.seed)
    chunks = seeds.run(options)
    print(summary(chunks))
    return any(chunk["failing"] for chunk in chunks)


if __name__ == "__main__":
    sys.exit(main())
