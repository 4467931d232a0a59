"""How this process's memory allocator treats what is freed."""

from __future__ import annotations

import contextlib
import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Of glibc's malloc.h."""
LARGEST_MESSAGES = 4 << 20
KEPT_BYTES = 16 << 20
"""Of each arena, when it is free."""
ARENAS = 2
"""Or what is kept would be as much for each of gRPC's threads: Python runs one at a time anyway."""


def keep_freed_memory() -> None:
    """For the next message.

    Workers move in messages of a MiB.  glibc would map each one's copies anew and give them back at once, and
    page faults then take more time than all else: half a gigabyte took 1.8 s instead of 0.7 wherever its own
    adaptation of these thresholds did not set in, as on one of two hosts.  Nothing happens elsewhere.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, LARGEST_MESSAGES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(M_ARENA_MAX, ARENAS)
