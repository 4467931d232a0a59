"""`make simulate-hosts`: many seeds on several processes, counted, resumable; `--seed N` explains one."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from simulation.__main__ import fingerprint
from simulation.many_seeds import Seeds
from simulation.run import quiet

from hosts_simulation.chunks import CHUNK, run_chunk, simulate, summary


def explain(seed: int) -> int:
    """One seed, line by line."""
    quiet()
    outcome = simulate(seed)
    print(*outcome.told, *outcome.violations, sep="\n")
    return bool(outcome.violations)


def main() -> int:
    """The command line."""
    code = partial(fingerprint, Path(__file__).parent)
    seeds = Seeds("simulate-hosts", CHUNK, run_chunk, code)
    options = seeds.options(__doc__)
    if options.seed is not None:
        return explain(options.seed)
    chunks = seeds.run(options)
    print(summary(chunks))
    return any(chunk["failing"] for chunk in chunks)


if __name__ == "__main__":
    sys.exit(main())
