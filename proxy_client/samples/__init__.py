"""`proxyrun --samples DIR`: which samples each minibatch had, written down without anything in the script.

Two levels that know nothing of each other: the indices of the batches that PyTorch's DataLoaders have
handed out (`drawing`, `own_iteration`), and a digest of what was copied to the device (`contents`).  Both go,
in their order, into one file for each rank (`recorder`), which `recoveryctl samples check` judges.
"""

from __future__ import annotations

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """A module of this package, without an import of `understudy`: see the package above."""
    if not name.startswith("__"):
        full = f"{__name__}.{name}"
        try:
            return importlib.import_module(full)
        except ModuleNotFoundError as error:
            if error.name != full:
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
