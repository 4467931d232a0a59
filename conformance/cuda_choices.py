"""What PyTorch's Python code chooses for CUDA, chosen for the CPU: a reference for what runs on the device.

An optimizer takes `foreach` for parameters on CUDA and a loop for others; the chunked `linear_cross_entropy`
accumulates in other types.  Both ask for the device's name.  Natively they are made to choose as on CUDA, so
that both sides compute the same and bits can be compared.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

_ASKED = 'device.type == "cuda"'
_CHUNKED = "torch.nn.modules.linear_cross_entropy"


@contextlib.contextmanager
def choosing_as_on_cuda() -> Iterator[None]:
    """Until it ends, what is on the CPU is treated as if it were on CUDA, by the code named above."""
    before = [inspect.getattr_static(choice.owner, choice.name) for choice in _choices()]
    try:
        for choice in _choices():
            setattr(choice.owner, choice.name, choice.as_on_cuda)
        yield
    finally:
        for choice, own in zip(_choices(), before, strict=True):
            setattr(choice.owner, choice.name, own)


class _Choice(NamedTuple):
    """What decides by the device's name, and what takes its place."""

    owner: Any
    name: str
    as_on_cuda: Any


@functools.cache
def _choices() -> list[_Choice]:
    return [*_of_optimizers(), *_of_cross_entropy()]


def _of_optimizers() -> Iterator[_Choice]:
    for found in pkgutil.iter_modules(torch.optim.__path__, "torch.optim."):
        module = importlib.import_module(found.name)
        for name in ("_get_foreach_kernels_supported_devices", "_get_capturable_supported_devices"):
            if hasattr(module, name):
                yield _Choice(module, name, lambda *_, **__: ["cpu", "cuda"])


def _of_cross_entropy() -> Iterator[_Choice]:
    if not hasattr(torch.nn.functional, "linear_cross_entropy"):
        return  # as in PyTorch 2.11
    _wide_products()
    context = importlib.import_module(_CHUNKED)._ChunkContext
    yield _Choice(context, "build", _building_as_on_cuda())
    options = importlib.import_module(f"{_CHUNKED}_options")
    defaults = options._AUTO_DEFAULTS
    of_cuda = {("cpu", dtype): choice for (device, dtype), choice in defaults.items() if device == "cuda"}
    yield _Choice(options, "_AUTO_DEFAULTS", {**defaults, **of_cuda})


def _building_as_on_cuda() -> Any:
    """PyTorch's own `_ChunkContext.build`, but for the answer to its one question."""
    module = importlib.import_module(_CHUNKED)
    source = textwrap.dedent(inspect.getsource(module._ChunkContext.build))
    if source.count(_ASKED) != 1:
        raise RuntimeError(f"{_CHUNKED} of PyTorch {torch.__version__} does not ask once: {_ASKED}")
    names: dict[str, Any] = {}
    exec(source.replace(_ASKED, 'device.type in ("cpu", "cuda")'), module.__dict__, names)
    return names["build"]


@functools.cache
def _wide_products() -> torch.library.Library:
    """Products whose result is wider than their factors, which only CUDA has: the factors are widened."""

    def widened(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*arguments: Any, **others: Any) -> torch.Tensor:
            *factors, dtype = arguments
            return product(*(factor.to(dtype) for factor in factors), **others)

        return run

    library = torch.library.Library("aten", "IMPL")
    for name in ("mm", "addmm"):
        for overload in ("dtype", "dtype_out"):
            library.impl(f"{name}.{overload}", widened(getattr(torch, name)), "CPU")
    return library
