"""What many ranks cost the one process that leads them: how they meet, and what they tell of one fault."""

import asyncio
import logging
import statistics
import sys
import time
from typing import Any

import rendezvous_cost
import structlog
from machine import ROOT

sys.path.insert(0, str(ROOT / "tests" / "harness"))
sys.path.insert(0, str(ROOT / "tests" / "harness" / "made_up"))

import made_up_ranks

Results = dict[str, Any]
MEETING_RANKS, MEETINGS, ADDRESS_BYTES = 64, 5, 186
TELLING_RANKS = 1024
COMMITS = 63
"""As many as a log's ring holds."""


def echoes(ranks: int) -> float:
    """Processor seconds of the leader while so many ranks tell it of one collective that has failed.

    The ranks' logs are the simulation's: what a real log's rows cost to read, 15 µs a rank, comes on top.
    """

    async def told() -> float:
        job = made_up_ranks.a_job(ranks)
        for first in range(COMMITS):
            made_up_ranks.step(job, *range(first, first + ranks))
        coordinator = made_up_ranks.a_coordinator(job)
        begin = time.process_time()
        for session in job.sessions.values():
            coordinator.collective_failed(session, session.generation, "connection closed by peer", 7)
        took = time.process_time() - begin
        await coordinator.cancel()
        return took

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    return asyncio.run(told())


def measure(times: int) -> Results:
    """Meetings of processes at the real store, and what `times` made-up jobs tell."""
    took, used = rendezvous_cost.measure(MEETING_RANKS, MEETINGS, ADDRESS_BYTES)
    told = [echoes(TELLING_RANKS) for _ in range(times)]
    return {
        "meeting_ranks": MEETING_RANKS,
        "meeting_s": statistics.median(took),
        "meetings_s": took,
        "store_cpu_s": used,
        "telling_ranks": TELLING_RANKS,
        "told_cpu_s": statistics.median(told),
        "all_told_cpu_s": told,
    }


def rows(results: Results) -> list[tuple[str, str, str]]:
    """For `make bench`."""
    return [
        (
            f"{results['meeting_ranks']} ranks meet (torch-free)",
            f"{results['meeting_s']:.3f} s",
            f"the store at work for {results['store_cpu_s']:.3f} s",
        ),
        (
            f"{results['telling_ranks']} ranks tell of one collective",
            f"{results['told_cpu_s']:.3f} s",
            "of the leader's processor, logs of the simulation",
        ),
    ]
