"""Natively: which bytes every operator of PyTorch's databases writes, forward and backward.

`bytes_of_operators.py FILE EVERY`: for each sample a list of its calls in order: name; digests of all bytes
of the memory of its fresh results; which arguments it changed though its schema does not say so. One sample
in EVERY of each entry. What differs between two runs under other values of MALLOC_PERTURB_ nobody wrote.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def digest(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
    return zlib.crc32(memory.numpy().tobytes())


def has_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta


class Bytes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[int], list[int]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        watched = list(self.read_only(func, args, kwargs))
        before = [digest(tensor) for _, tensor in watched]
        result = func(*args, **kwargs)
        changed = [
            number for (number, tensor), old in zip(watched, before, strict=True) if digest(tensor) != old
        ]
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if has_memory(t)}
        fresh = [t for t in tree_leaves(result) if has_memory(t) and t.untyped_storage()._cdata not in given]
        results = [digest(t) for t in fresh]
        self.calls.append((func.name(), results, changed))
        return result

    def read_only(self, func: Any, args: Any, kwargs: Any) -> Iterator[tuple[int, torch.Tensor]]:
        given = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
        written = {
            tensor.untyped_storage()._cdata
            for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(given.get(argument.name))
            if has_memory(tensor)
        }
        for number, value in enumerate([*args, *kwargs.values()]):
            for tensor in tree_leaves(value):
                if has_memory(tensor) and tensor.untyped_storage()._cdata not in written:
                    yield number, tensor


def backward(out: Any) -> None:
    differentiable = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
    real = [
        torch.view_as_real(t) if t.is_complex() else t for t in differentiable if t.layout == torch.strided
    ]
    if real:
        torch.autograd.backward(real, [torch.ones_like(t) for t in real])


def operators(every: int, device: str = "cpu") -> Iterator[Callable[[], Any]]:
    for op in op_db:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            if dtype not in op.dtypes:
                continue
            try:
                learns = op.supports_autograd and dtype.is_floating_point
                samples = list(itertools.islice(op.sample_inputs(device, dtype, requires_grad=learns), 60))
            except Exception:  # noqa: BLE001 - some need what is not here
                continue
            for sample in samples[::every]:
                yield functools.partial(op, sample.input, *sample.args, **sample.kwargs)


def modules(every: int, device: str = "cpu") -> Iterator[Callable[[], Any]]:
    for entry in module_db:
        for training in (True, False):
            try:
                inputs = entry.module_inputs_func(
                    entry, device=device, dtype=torch.float32, requires_grad=True, training=training
                )
            except Exception:  # noqa: BLE001 - some need what is not here
                continue
            for given in inputs[::every]:
                if given.forward_input is None:
                    continue

                def call(entry: Any = entry, given: Any = given, training: bool = training) -> Any:
                    constructor, forward = given.constructor_input, given.forward_input
                    made = entry.module_cls(*constructor.args, **constructor.kwargs)
                    module = made.to(device).train(training)
                    return module(*forward.args, **forward.kwargs)

                yield call


def layers(_: int) -> Iterator[Callable[[], Any]]:
    """Larger than those of the database: with one step there is nothing to leave."""
    for both in (False, True):
        yield functools.partial(torch.nn.LSTM(8, 16, bidirectional=both), torch.randn(5, 3, 8))


def main(file: str, every: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    samples = []
    for call in itertools.chain(operators(every), modules(every), layers(every)):
        torch.manual_seed(0)
        watch = Bytes()
        try:
            with watch:
                backward(call())
        except Exception:  # noqa: BLE001 - an operator that refuses its arguments computes nothing
            pass
        samples.append(watch.calls)
    Path(file).write_text(json.dumps(samples))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
