"""What autocast does on CUDA, done on the CPU: a reference for programs under `torch.autocast("cuda")`.

Which operators a device computes in half precision and which in float32 stands in the lists of
ATen/autocast_mode.h; the CPU has lists of its own.  Here those of CUDA are read and registered for the CPU,
with casts written anew in Python: a CPU tensor under `torch.autocast("cpu")` is cast as a CUDA tensor is.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
BANNED = "binary_cross_entropy"
_OF_CUDNN = {"cudnn_convolution", "cudnn_convolution_transpose"}
"""In no list, and nothing that a CPU is asked for."""
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)


Kernel = Callable[..., Any]
_cast_once: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
"""Parameters and what they were cast to: once in an autocast, so that gradients add up in half precision."""
KINDS = (torch.float16, torch.bfloat16)


def under_autocast(function: Kernel, dtype: torch.dtype) -> Kernel:
    """The same under autocast as CUDA has it, on either side; gradients are computed outside."""

    def cast(*args: Any, **kwargs: Any) -> Any:
        use_lists_of_cuda()
        _cast_once.clear()
        leaves = tree_leaves((args, kwargs))
        on_device = any(isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in leaves)
        with torch.autocast("cuda" if on_device else "cpu", dtype):
            return function(*args, **kwargs)

    return cast


def lists_of_cuda() -> Iterator[tuple[str, str]]:
    """An operator, as `name.overload`, and the list that it is in."""
    for macro, body in re.findall(r"#define AT_FORALL_(\w+)\(_\)((?:.*\\\n)+.*\n)", HEADER.read_text()):
        if macro == "DIFFERENT_REDISPATCH_SIGNATURE":
            yield from ((name, macro) for name in re.findall(r'"([\w.]+)"', body))
        elif macro != "DEPRECATED_AUTOCAST_BACKENDS":
            for name, overload in re.findall(r"_\((\w+)(?:, (\w+))?\)", body):
                yield f"{name}.{overload}" if overload else name, macro
    yield BANNED, "BANNED"


@functools.cache
def use_lists_of_cuda() -> torch.library.Library:
    """From now on in this process.  Raises RuntimeError if PyTorch has operators in other lists."""
    policies = dict(lists_of_cuda())
    cuda, cpu = (
        {name.removeprefix("aten::") for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)}
        for key in ("AutocastCUDA", "AutocastCPU")
    )
    if set(policies) != cuda - _OF_CUDNN:
        raise RuntimeError(f"{HEADER} does not say all: {sorted(set(policies) ^ (cuda - _OF_CUDNN))}")
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each is registered over the CPU's own
        for name in sorted(policies.keys() | cpu):
            kernel = _kernel(name, policies[name]) if name in policies else torch.library.fallthrough_kernel
            library.impl(name, kernel, "AutocastCPU", allow_override=True)
    return library


def _kernel(name: str, policy: str) -> Kernel:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    cast = _POLICIES[policy]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast(operator, args, kwargs)
        if policy == "BANNED":
            return operator.redispatch(_CUDA, *args, **kwargs)
        if policy == "DIFFERENT_REDISPATCH_SIGNATURE" and "dtype" in kwargs:
            return _without_autocast(operator.overloadpacket, *args, **kwargs)
        return _without_autocast(operator, *args, **kwargs)

    return kernel


def _without_autocast(function: Kernel, *args: Any, **kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(_CPU):
        return function(*args, **kwargs)


def _eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _is_kept(value: torch.Tensor) -> bool:
    """Whether autocast remembers what it was cast to."""
    return value.requires_grad and value.is_leaf and not value._is_view() and value.dtype == torch.float32


def _cast(dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    def one(value: Any) -> Any:
        if not _eligible(value) or value.dtype == dtype:
            return value
        if not _is_kept(value) or dtype not in KINDS:
            return value.to(dtype)
        if id(value) not in _cast_once:
            _cast_once[id(value)] = value, value.to(dtype)
        return _cast_once[id(value)][1]

    return _without_autocast(tree_map, one, (args, kwargs))


def _lower(_: Any, args: Any, kwargs: Any) -> Any:
    return _cast(torch.get_autocast_dtype("cpu"), args, kwargs)


def _float32(_: Any, args: Any, kwargs: Any) -> Any:
    return _cast(torch.float32, args, kwargs)


def _result_in_float32(operator: Any, args: Any, kwargs: Any) -> Any:
    """Of a sum or the like: its argument `dtype`, unless the caller gives it."""
    names = [argument.name for argument in operator._schema.arguments]
    given = kwargs.get("dtype")
    if "dtype" in names[: len(args)]:
        given = args[names.index("dtype")]
    if given is None and _eligible(args[0]):
        args = [*args[: names.index("dtype")]] if "dtype" in names[: len(args)] else args
        kwargs = {**kwargs, "dtype": torch.float32}
    return args, kwargs


def _norm(operator: Any, args: Any, kwargs: Any) -> Any:
    """Of two overloads without `dtype`, those that have it are called."""
    defaults = [argument.default_value for argument in operator._schema.arguments]
    args = [*args, *defaults[len(args) :]]
    for place, argument in enumerate(operator._schema.arguments):
        args[place] = kwargs.get(argument.name, args[place])
    return args, {"dtype": torch.float32 if _eligible(args[0]) else args[0].dtype}


def _widest(_: Any, args: Any, kwargs: Any) -> Any:
    wide = any(_eligible(v) and v.dtype == torch.float32 for v in tree_leaves((args, kwargs)))
    return _cast(torch.float32 if wide else torch.get_autocast_dtype("cpu"), args, kwargs)


_POLICIES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "LOWER_PRECISION_FP": _lower,
    "FP32": _float32,
    "FP32_SET_OPT_DTYPE": _result_in_float32,
    "DIFFERENT_REDISPATCH_SIGNATURE": _norm,
    "PROMOTE": _widest,
    "BANNED": lambda _, args, kwargs: (args, kwargs),
}
