"""What a simulated CUDA device does, each by its name on the command line; prints what came of it.

With SIMULATED_CUDA_LIBRARY in the environment, which names it.
"""

import ctypes
import sys
from collections.abc import Callable

import simulated_device
from simulated_device import counters, fail

simulated_device.load()

import torch  # noqa: E402 - it looks for devices when it is imported

torch.cuda._lazy_init = lambda: None  # asks for a CUDA build
GPU = "cuda:0"


def touch() -> None:
    """Of the device's memory, on the host: the end of this process."""
    x = torch.ones(4, device=GPU)
    print("touches", flush=True)
    ctypes.string_at(x.data_ptr(), 4)


def asynchrony() -> None:
    """A call returns before its kernel has run, from the second one of its kind on."""
    x = torch.ones(1000, device=GPU)
    for _ in range(2):
        y = x + 1
    before = counters()
    for _ in range(50):
        y = y + 1
    now = counters()
    print(now.launches - before.launches, now.waits - before.waits, y.sum().item())


def poison() -> None:
    """Memory that was given back is not what it was, once its stream has passed that."""
    x, one = torch.ones(1000, device=GPU), torch.ones(1, device=GPU)
    place = x.data_ptr()
    del x
    one.item()  # waits, and allocates nothing, which could get that place
    y = torch.empty(1000, device=GPU)
    print(y.data_ptr() == place, bool((y == 1).any().item()))


def limit() -> None:
    """More than the device has."""
    try:
        torch.empty(3 << 30, dtype=torch.uint8, device=GPU)
    except torch.cuda.OutOfMemoryError as error:
        print(str(error).split(".")[0])
    print(torch.empty(1 << 30, dtype=torch.uint8, device=GPU).numel())


def sticky() -> None:
    """An error in a stream comes up later, and stays."""
    x = torch.ones(4, device=GPU)
    x.add_(1)
    fail(simulated_device.IN_STREAM, 700)
    x.add_(1)
    for _ in range(2):
        try:
            print(x.sum().item())
        except torch.AcceleratorError as error:
            print(error.error_code, str(error).splitlines()[0])


def assertion() -> None:
    """An index that is out of range is found out by the kernel, not by the call."""
    table, ids = torch.ones(4, 2, device=GPU), torch.tensor([0, 1], device=GPU)
    for _ in range(2):
        torch.nn.functional.embedding(ids, table)
    ids.fill_(9)
    torch.nn.functional.embedding(ids, table)
    try:
        ids.cpu()
    except torch.AcceleratorError as error:
        print(error.error_code, str(error).splitlines()[0])


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case for case in (touch, asynchrony, poison, limit, sticky, assertion)
}
CASES[sys.argv[1]]()
