"""Puts the simulated CUDA device (tests/csrc/simulated_cuda) into this process, before it imports PyTorch."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path

from compiled_programs import program

SITE = Path(__file__).resolve().parent.parent / "simulated_cuda_site"
DRIVER = "simulated-cuda"
"""What UNDERSTUDY_TEST_DRIVER says for it."""
NCCL = "simulated_nccl_library"
"""The folder whose library own calls of NCCL find."""
LAUNCH, SYNCHRONIZE, IN_STREAM, ALLOCATE = range(4)
"""Where an error can be made to come up."""


def wanted() -> bool:
    """Whether tests are to run on it."""
    return os.environ.get("UNDERSTUDY_TEST_DRIVER") == DRIVER


def environment(devices: int = 4) -> dict[str, str]:
    """Variables for a proxyd, whose device servers then have so many simulated GPUs. Builds what they load.

    Device servers with them must be started anew: a fork of a zygote has read its own.
    """
    library = program("libsimulated_cuda.so")
    program("simulated_nccl")
    folders = [program(name) for name in ("simulated_driver", NCCL)]  # with libcuda.so.1 and libnccl.so.2
    return {
        "UNDERSTUDY_TEST_DRIVER": DRIVER,
        "SIMULATED_CUDA_LIBRARY": str(library),
        "SIMULATED_CUDA_DEVICES": str(devices),
        "PYTHONPATH": str(SITE),
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, folders)),
    }


def load() -> ctypes.CDLL:
    """The library; PyTorch finds its hooks when it is imported. Raises RuntimeError if that has happened."""
    if "torch" in sys.modules:
        raise RuntimeError("the simulated CUDA device must be loaded before PyTorch is imported")
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    ctypes.CDLL(str(Path(found.origin).parent / "lib" / "libtorch_cpu.so"))
    return ctypes.CDLL(os.environ["SIMULATED_CUDA_LIBRARY"], mode=ctypes.RTLD_GLOBAL)
