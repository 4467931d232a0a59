"""What only a CUDA build of PyTorch has: ways to a driver, each of which is closed in a worker.

`cuda_attributes` answers for most of `torch._C`'s CUDA half. What is left in a CUDA build would call the real
runtime, with addresses that mean nothing to it: those names raise instead, and say so.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

_DRIVER_PREFIXES = ("_cuda_", "_nccl_")

# Settings of PyTorch itself: they reach no driver.
_HARMLESS = frozenset(
    {
        "_cuda_get_conv_benchmark_empty_cache",
        "_cuda_get_cudnn_benchmark_limit",
        "_cuda_set_cudnn_benchmark_limit",
    }
)

# Further names that reach the driver, and what a script uses instead. What a CPU build has too has a row in
# `refusals.py`, which is put over these afterwards.
_INSTEAD = {
    "_CUDAGreenContext": "torch.cuda.Stream",
    "_CUDAPluggableAllocator": "the device's own allocator",
    "_FastCudaLauncher": "PyTorch's own operators",
    "_StaticCudaLauncher": "PyTorch's own operators",
}


def is_cuda_build(torch_c: ModuleType) -> bool:
    """Whether this PyTorch was compiled with CUDA, whatever we have put into it."""
    return hasattr(torch_c, "_cuda_getAllocator")


def names_to_close(torch_c: ModuleType, answered: frozenset[str]) -> list[str]:
    """The names of `torch._C` that would reach the driver, but for those that we answer for ourselves."""
    return sorted(
        name
        for name in dir(torch_c)
        if (name.startswith(_DRIVER_PREFIXES) or name in _INSTEAD)
        and name not in answered
        and name not in _HARMLESS
    )


def close(torch_c: ModuleType, answered: frozenset[str]) -> None:
    """Has everything raise that would reach a driver; `answered` is what the virtual device answers for."""
    if not is_cuda_build(torch_c):
        return
    for name in names_to_close(torch_c, answered):
        refuse = _refusal(name)
        if isinstance(getattr(torch_c, name), type):  # PyTorch derives classes of its own from these
            setattr(torch_c, name, type(name, (), {"__new__": refuse}))
        else:
            setattr(torch_c, name, refuse)
    # Libraries of the worker's own PyTorch, which the device may not have. Convolutions go to the device
    # whole, and the device server uses cuDNN for them if it has it.
    torch_c._has_cudnn = False  # type: ignore[attr-defined]
    torch_c._has_cusparselt = False  # type: ignore[attr-defined]


def close_late(torch: ModuleType) -> None:
    """Once torch is whole: takes back the kernels in Python (Triton) that it has put over ours at CUDA."""
    native = getattr(torch, "_native", None)  # not before PyTorch 2.13
    if native is not None and is_cuda_build(torch._C):
        native.registry.deregister_op_overrides(disable_dispatch_keys="CUDA")


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        instead = _INSTEAD.get(name)
        raise NotImplementedError(
            f"torch._C.{name} works on the driver, and there is none in a worker of understudy: the device "
            "is in another process" + (f"; use {instead} instead" if instead else "")
        )

    refuse.__name__ = refuse.__qualname__ = name
    return refuse
