"""Puts the simulated CUDA device (tests/csrc/simulated_cuda) into this process, before it imports PyTorch."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from compiled_programs import program
from places import TESTS

if TYPE_CHECKING:  # processes that have the device load no pytest
    import pytest

SITE = TESTS / "harness" / "devices" / "simulated_cuda_site"
DRIVER = "simulated-cuda"
"""What UNDERSTUDY_TEST_DRIVER says for it."""
NCCL = "simulated_nccl_library"
"""The folder whose library own calls of NCCL find."""
LAUNCH, SYNCHRONIZE, IN_STREAM, ALLOCATE = range(4)
"""Where an error can be made to come up."""


class Counters(NamedTuple):
    """Of a process with the device, since it began."""

    launches: int
    waits: int
    to_device: int
    to_host: int
    digested: int
    commits: int
    overlapping: int


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


def put_in_place(monkeypatch: pytest.MonkeyPatch, **more: str) -> None:
    """For all that a test starts from here on; `more`: further variables."""
    for name, value in (environment() | more).items():
        monkeypatch.setenv(name, value)


def load() -> ctypes.CDLL:
    """The library; PyTorch finds its hooks when it is imported. Raises RuntimeError if that has happened."""
    if "torch" in sys.modules:
        raise RuntimeError("the simulated CUDA device must be loaded before PyTorch is imported")
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    ctypes.CDLL(str(Path(found.origin).parent / "lib" / "libtorch_cpu.so"))
    return ctypes.CDLL(os.environ["SIMULATED_CUDA_LIBRARY"], mode=ctypes.RTLD_GLOBAL)


def counters() -> Counters:
    """Of this process."""
    found = (ctypes.c_uint64 * len(Counters._fields))()
    _library().simulated_cuda_counters(found)
    return Counters._make(found)


def counters_in(folder: Path) -> dict[str, Counters]:
    """Of each process for which SIMULATED_CUDA_COUNTERS named that folder, by its number."""
    layout = struct.Struct(f"<{len(Counters._fields)}Q")
    found = {one.name: one.read_bytes() for one in folder.iterdir()}
    return {
        name: Counters._make(layout.unpack(content))
        for name, content in found.items()
        if len(content) == layout.size
    }


def fail(place: int, code: int, nth: int = 1) -> None:
    """The next time that this process comes to that place, or the nth."""
    _library().simulated_cuda_fail(place, ctypes.c_uint64(nth), code)


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(os.environ["SIMULATED_CUDA_LIBRARY"])
