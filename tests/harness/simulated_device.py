"""Puts the simulated CUDA device (tests/csrc/simulated_cuda) into this process, before it imports PyTorch."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path

DRIVER = "simulated-cuda"
"""What UNDERSTUDY_TEST_DRIVER says for it."""
LAUNCH, SYNCHRONIZE, IN_STREAM, ALLOCATE = range(4)
"""Where an error can be made to come up."""


def wanted() -> bool:
    """Whether tests are to run on it."""
    return os.environ.get("UNDERSTUDY_TEST_DRIVER") == DRIVER


def load(library: Path) -> ctypes.CDLL:
    """The library; PyTorch finds its hooks when it is imported. Raises RuntimeError if that has happened."""
    if "torch" in sys.modules:
        raise RuntimeError("the simulated CUDA device must be loaded before PyTorch is imported")
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    ctypes.CDLL(str(Path(found.origin).parent / "lib" / "libtorch_cpu.so"))
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
