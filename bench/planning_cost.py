"""Processor seconds for one plan of a large job: `python bench/planning_cost.py 1000 10000`.

Medians of `TIMES` plans.  The facts are made up, and the buffers of replicas are there before: what a planner
reads of logs is not in the figures.  The last column is the most memory that the process had, facts included.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "harness" / "made_up"))

from made_up_jobs import large_job

from understudy.recovery.planning.facts import Facts
from understudy.recovery.planning.planner import plan

TIMES = 5


def main() -> None:
    print("| ranks | all replicas there, s | one missing, s | one in a hundred dead, s | memory, MB |")
    print("|---:|---:|---:|---:|---:|")
    for world in (int(word) // 64 * 64 for word in sys.argv[1:] or ("1000", "10000")):
        middle = (world // 2,)
        spent = [
            seconds(large_job(world, middle)),
            seconds(large_job(world, middle, alone=middle)),
            seconds(large_job(world, range(50, world, 100))),
        ]
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
        print(f"| {world} | {' | '.join(f'{one:.3f}' for one in spent)} | {most:.0f} |", flush=True)


def seconds(facts: Facts) -> float:
    spent = []
    for _ in range(TIMES):
        begun = time.process_time()
        plan(facts)
        spent.append(time.process_time() - begun)
    return statistics.median(spent)


if __name__ == "__main__":
    main()
