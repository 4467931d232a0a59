"""Many seeds at once, counted.  Not in `__main__`, from which a spawned process can import nothing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from simulation.run import Outcome, quiet, simulate

CHUNK = 200
"""Seeds that a process takes at once; what is done is remembered by the chunk."""


def run_chunk(first: int) -> dict[str, Any]:
    """One chunk of seeds, as it is written down."""
    quiet()
    return chunk_of(simulate, range(first, first + CHUNK))


def chunk_of(simulate: Callable[[int], Outcome], seeds: range) -> dict[str, Any]:
    """The same, of any simulation of jobs."""
    plans: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    failing: dict[str, str] = {}
    begin = time.process_time()
    for seed in seeds:
        outcome = simulate(seed)
        plans.update(outcome.plans)
        faults.update(outcome.faults)
        numbers.update(_numbers(outcome))
        numbers["largest world"] = max(numbers["largest world"], outcome.world)
        if outcome.violations:
            failing[str(seed)] = outcome.violations[0]
    return {
        "first": seeds[0], "plans": plans, "faults": faults, "numbers": numbers, "failing": failing,
        "cpu_s": round(time.process_time() - begin, 3),
    }  # fmt: skip


def _numbers(outcome: Outcome) -> dict[str, int]:
    return {
        "schedules": 1,
        "events": outcome.events,
        "rounds": outcome.rounds,
        "buffers copied from a replica": outcome.copied,
        "ranks that ended as undisturbed": outcome.ended,
        "ranks given up with reason": outcome.given_up,
        "validations": outcome.validations,
        "planned moves": outcome.moved,
        "proxyds that followed another one": outcome.adopted,
    }


def count(chunks: list[dict[str, Any]], title: str) -> Counter[str]:
    """One of "numbers", "plans" and "faults" over all chunks."""
    counted: Counter[str] = Counter()
    for chunk in chunks:
        counted.update({name: n for name, n in chunk[title].items() if name != "largest world"})
    return counted


def summary(chunks: list[dict[str, Any]]) -> str:
    """Everything that was counted."""
    lines = []
    for title in ("numbers", "plans", "faults"):
        lines.append(f"{title}:")
        lines += [f"  {number:>10}  {name}" for name, number in count(chunks, title).most_common()]
    largest = max((chunk["numbers"]["largest world"] for chunk in chunks), default=0)
    lines.append(f"largest world: {largest} ranks; CPU time: {sum(chunk['cpu_s'] for chunk in chunks):.0f} s")
    failing = {seed: text for chunk in chunks for seed, text in chunk["failing"].items()}
    lines.append(f"violations: {len(failing)}")
    lines += [f"  --seed {seed}: {text}" for seed, text in list(failing.items())[:20]]
    return "\n".join(lines)
