"""torch.cuda.nvtx: ranges and marks are accepted and go nowhere, as with CUDA while no profiler listens."""

from __future__ import annotations

import sys
import threading
from types import ModuleType

_depth = threading.local()


def _push(_: str) -> int:
    """The depth of the range that begins, from 0."""
    depth: int = getattr(_depth, "value", 0)
    _depth.value = depth + 1
    return depth


def _pop() -> int:
    """The depth of the range that ends; -1 if none is open."""
    depth: int = getattr(_depth, "value", 0)
    _depth.value = max(depth - 1, 0)
    return depth - 1


def install(torch_c: ModuleType) -> None:
    """Adds the module `torch._C._nvtx`, which CPU builds leave out."""
    module = ModuleType("torch._C._nvtx")
    for name, value in {
        "rangePushA": _push,
        "rangePop": _pop,
        "rangeStartA": lambda _: 1,
        "rangeEnd": lambda _: None,
        "markA": lambda _: None,
        "deviceRangeStart": lambda *_: object(),
        "deviceRangeEnd": lambda *_: None,
    }.items():
        setattr(module, name, value)
    torch_c._nvtx = module  # type: ignore[attr-defined]
    sys.modules["torch._C._nvtx"] = module
