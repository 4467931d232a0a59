"""Many seeds at once, counted.  Not in `__main__`, from which a spawned process can import nothing."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from simulation.run import quiet

from hosts_simulation import moving
from hosts_simulation.outcome import Outcome

CHUNK = 100
"""Seeds that a process takes at once; what is done is remembered by the chunk."""


def simulate(seed: int) -> Outcome:
    """The schedule of a seed."""
    return moving.simulate(seed)


def run_chunk(first: int) -> dict[str, Any]:
    """One chunk of seeds, as it is written down."""
    quiet()
    counts: Counter[str] = Counter()
    failing: dict[str, str] = {}
    begin = time.process_time()
    for seed in range(first, first + CHUNK):
        outcome = simulate(seed)
        counts.update(outcome.counts)
        counts["schedules"] += 1
        if outcome.violations:
            failing[str(seed)] = outcome.violations[0]
    cpu_s = round(time.process_time() - begin, 3)
    return {"first": first, "counts": counts, "failing": failing, "cpu_s": cpu_s}


def count(chunks: list[dict[str, Any]]) -> Counter[str]:
    """Over all chunks."""
    counted: Counter[str] = Counter()
    for chunk in chunks:
        counted.update(chunk["counts"])
    return counted


def summary(chunks: list[dict[str, Any]]) -> str:
    """Everything that was counted."""
    lines = [f"{number:>10}  {name}" for name, number in count(chunks).most_common()]
    failing = {seed: text for chunk in chunks for seed, text in chunk["failing"].items()}
    lines.append(f"CPU time: {sum(chunk['cpu_s'] for chunk in chunks):.0f} s; violations: {len(failing)}")
    lines += [f"  --seed {seed}: {text}" for seed, text in list(failing.items())[:20]]
    return "\n".join(lines)
