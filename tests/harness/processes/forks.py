"""Forks of the process that runs the tests."""

from __future__ import annotations

import gc
import os


def fork() -> int:
    """As os.fork(); the child collects nothing that it has from here.

    In it, what other tests left of gRPC would wait for threads that it does not have, and never end.
    """
    pid = os.fork()
    if pid == 0:
        gc.freeze()
    return pid
