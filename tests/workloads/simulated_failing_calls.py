"""Calls that fail on a simulated CUDA device, each by its name on the command line; prints what came of it.

With SIMULATED_CUDA_LIBRARY in the environment, which names it.
"""

import os
import struct
import sys
from collections.abc import Callable

import simulated_device
from simulated_device import fail

simulated_device.load()

from executor_harness import OPERATOR, PHASE, Harness, vector  # noqa: E402 - it imports PyTorch, which looks for devices

INVALID_VALUE, ILLEGAL_ADDRESS, MPS_CLIENT_TERMINATED = 1, 700, 810
LIBRARY_ERROR = b"cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"


def call_a_library(h: Harness, device: int) -> None:
    """An operator whose error does not say what is the cause; `device`: that of the device, if any."""
    h.new(1, [0.0])
    h.synchronize()
    padded = LIBRARY_ERROR.ljust(-(-len(LIBRARY_ERROR) // 8) * 8, b"\0")
    text = [9 | len(LIBRARY_ERROR) << 8, *struct.unpack(f"<{len(padded) // 8}Q", padded)]
    template = h.template("aten::_assert_async.msg", [*vector(1), *text], outputs=[])
    if device:
        fail(simulated_device.SYNCHRONIZE, device)
    h.writer.append(OPERATOR, template, [1])


def library_on_a_sound_device() -> None:
    """The program's own error."""
    with Harness() as h:
        call_a_library(h, 0)
        try:
            h.synchronize()
        except RuntimeError as problem:
            print(LIBRARY_ERROR.decode() in str(problem))


def library_on_a_device_that_refuses_a_call() -> None:
    """Worth another attempt."""
    with Harness() as h:
        call_a_library(h, INVALID_VALUE)
        fault = h.executor.wait_for_fault(30_000)
        print(fault is not None and fault[0] == "call" and "invalid argument" in fault[1])


def library_on_a_lost_device() -> None:
    """The end of the process."""
    with Harness() as h:
        call_a_library(h, ILLEGAL_ADDRESS)
        h.synchronize()


def lost_device() -> None:
    """An error that its code alone tells: the simulated device has no words for it. It ends the process."""
    with Harness() as h:
        h.new(1, [1.0, 2.0, 3.0, 4.0])
        h.add(1, 1)
        h.synchronize()
        fail(simulated_device.IN_STREAM, MPS_CLIENT_TERMINATED)
        h.add(1, 1)
        h.read(1)


def lost_device_at_a_commit() -> None:
    """What a commit launches finds it out: copies, or our code for digests."""
    with Harness() as h:
        h.new(1, [1.0, 2.0, 3.0, 4.0])
        h.commit()
        h.add(1, 1)
        h.synchronize()
        fail(simulated_device.LAUNCH, ILLEGAL_ADDRESS, int(os.environ["NTH"]))
        h.commit()
        h.writer.append(PHASE, 0, [])
        h.synchronize()


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        library_on_a_sound_device,
        library_on_a_device_that_refuses_a_call,
        library_on_a_lost_device,
        lost_device,
        lost_device_at_a_commit,
    )
}
CASES[sys.argv[1]]()
sys.stdout.flush()
os._exit(0)
