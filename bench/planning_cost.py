"""Processor seconds for one plan of a large job: `python bench/planning_cost.py 1000 10000`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from made_up_jobs import large_job

from understudy.recovery.planning.planner import plan


def main() -> None:
    print(
        "| ranks | all replicas there, s | one missing, s | one in a hundred dead, s |\n|---:|---:|---:|---:|"
    )
    for world in (int(word) // 64 * 64 for word in sys.argv[1:] or ("1000", "10000")):
        middle = (world // 2,)
        jobs = (
            large_job(world, middle),
            large_job(world, middle, alone=middle),
            large_job(world, range(50, world, 100)),
        )
        spent = []
        for facts in jobs:
            begun = time.process_time()
            plan(facts)
            spent.append(f"{time.process_time() - begun:.3f}")
        print(f"| {world} | {' | '.join(spent)} |", flush=True)


if __name__ == "__main__":
    main()
