"""One rank that trains with collectives of NCCL, on the STAND-IN of tests/csrc/stand_in_cuda: no GPU is here.

    LD_PRELOAD="$(python -m understudy.jit preload)" python jit_on_cuda.py FRAMEWORK DIRECTORY STEPS

The parameters of the "device" are bytes, all equal to the number of completed steps. In step STEPS the peer
does not come. What is saved must have the bytes of the step that it says.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path

import torch

import understudy.jit as jit
from understudy.jit import cuda_watch

framework = ctypes.CDLL(sys.argv[1])  # in a scope of its own, as PyTorch is
framework.framework_size.restype = ctypes.c_size_t
framework.framework_device_synchronizations.restype = ctypes.c_uint64


class StandInStreams:
    """PyTorch's part, which a CPU build does not have: device 0, and its default stream."""

    def current(self) -> list[tuple[int, int]]:
        return [(0, 0)]

    def use(self, device: int, stream: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def nccl_is_up(self) -> bool:
        return True


def save(path: Path) -> None:
    copied = (ctypes.c_ubyte * framework.framework_size())()
    assert framework.framework_copy_out(copied) == 0
    path.write_bytes(bytes([framework.framework_device_synchronizations()]) + bytes(copied))


cuda_watch.TorchStreams = StandInStreams  # type: ignore[misc,assignment]
framework.framework_open()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
jit.init(save_checkpoint=save, directory=sys.argv[2], minimum_stall=0.1)
for step in range(int(sys.argv[3]) + 1):
    model(torch.ones(4)).backward()
    framework.framework_lose_peer(step == int(sys.argv[3]))
    framework.framework_reduce_gradients()
    optimizer.step()
    framework.framework_update_parameters(step + 1)
    jit.boundary()
    framework.framework_synchronize()  # as loss.item() does
