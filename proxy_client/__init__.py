"""The virtual device: what turns "cuda" in an unmodified training script into records of a log.

This package is the only part of Understudy inside a worker. `boot/sitecustomize.py` loads it by path, so it
must import nothing of ours but itself, and of everyone else's only the standard library and, once that is
loaded, torch.
"""

from __future__ import annotations

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """A module of this package, for `from understudy.proxy_client import name`.

    Python's own way of finding it imports `understudy`, too, which in a worker is nobody's or the script's.
    """
    if not name.startswith("__"):
        full = f"{__name__}.{name}"
        try:
            return importlib.import_module(full)
        except ModuleNotFoundError as error:
            if error.name != full:
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
