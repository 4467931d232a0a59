"""Many seeds at once, counted.  Not in `__main__`, from which a spawned process can import nothing."""

from __future__ import annotations

from typing import Any

from simulation.chunks import chunk_of
from simulation.run import quiet

from job_simulation.run import simulate

CHUNK = 25
"""Seeds that a process takes at once; what is done is remembered by the chunk."""


def run_chunk(first: int) -> dict[str, Any]:
    """One chunk of seeds, as it is written down."""
    quiet()
    return chunk_of(simulate, range(first, first + CHUNK))
