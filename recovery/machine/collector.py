"""Python's collector of reference cycles, where it is in the way."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """It does not run meanwhile; as a decorator, too.

    Whoever makes many objects that live on has it visit all objects of the process again and again: half of
    the time of a plan for 100,000 ranks.  What is made must hold no cycles.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
