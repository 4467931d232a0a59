"""Which GPUs this machine has, without asking a driver: that takes seconds, and memory on each of them."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from understudy.recovery.base.errors import BadInput

KERNEL = Path("/proc/driver/nvidia/gpus")


def gpus_of_machine(kernel: Path = KERNEL) -> int:
    """As its kernel lists them, no more than CUDA_VISIBLE_DEVICES gives us; 0 where there is no driver."""
    try:
        count = sum(1 for _ in kernel.iterdir())
    except OSError:
        return 0
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [] if given is None else [name for name in given.split(",") if name.strip() not in ("", "-1")]
    return count if given is None else min(count, len(names))


def refuse_missing_driver(kind: str) -> None:
    """Raises BadInput where no device of `kind` could be had, before PyTorch is loaded to find that out."""
    if kind != "cuda":
        return
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as problem:
        raise BadInput(f"--devices cuda: this machine has no CUDA driver ({problem}); write cpu:2") from None
