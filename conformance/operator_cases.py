"""Cases of `op_db`: forward with first-order gradients, `out=`, in place, and inputs that must be refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from cases import Case, Execution, Run
from cuda_autocast import KINDS, under_autocast
from databases import Unit, dtype_name
from observation import observe
from reasons import KEPT_ON_CPU, NO_DEFINED_BITS
from snapshots import CannotCopy, Snapshot, tensors_in
from sparse_samples import sparse_samples

_SPARSE_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
Function = Callable[..., Any]


def cases(unit: Unit) -> Iterator[Case]:
    """In an order that is always the same."""
    op, dtype = unit.entry.info, unit.dtype
    bits = unit.entry.name not in NO_DEFINED_BITS
    gradients = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    for index, sample in enumerate(list(op.sample_inputs("cpu", dtype, requires_grad=gradients))):
        yield from _of_sample(op, sample, index, gradients=gradients, bits=bits)
        if dtype is torch.float32:
            yield from _autocast(op, sample, index, gradients=gradients, bits=bits)
    yield from _of_sparse_layouts(op, dtype, bits=bits)
    if op.error_inputs_func is not None and dtype == unit.entry.dtypes[0]:
        for index, bad in enumerate(list(op.error_inputs("cpu"))):
            sample = bad.sample_input
            yield from _copied(
                op.formatted_name, "error", index, (sample.input, sample.args, sample.kwargs), _call(op.op)
            )


def _of_sample(op: Any, sample: Any, index: int, *, gradients: bool, bits: bool) -> Iterator[Case]:
    given = (sample.input, sample.args, sample.kwargs)
    yield from _copied(op.formatted_name, "forward", index, given, _call(op.op, bits=bits))
    if gradients:
        yield from _copied(
            op.formatted_name, "backward", index, given, _differentiate(op.op, sample.output_process_fn_grad)
        )
    if op.inplace_variant is not None and not sample.broadcasts_input:
        yield from _copied(
            op.formatted_name,
            "inplace",
            index,
            given,
            _call(op.inplace_variant, bits=bits, requires_grad=False),
        )
    if op.supports_out and "out" not in sample.kwargs:
        yield from _out_cases(op, given, index, bits=bits)


def _autocast(op: Any, sample: Any, index: int, *, gradients: bool, bits: bool) -> Iterator[Case]:
    """Of both kinds; gradients are compared where there are any."""
    given = (sample.input, sample.args, sample.kwargs)
    for kind in KINDS:
        function = under_autocast(op.op, kind)
        make = (
            _differentiate(function, sample.output_process_fn_grad)
            if gradients
            else _call(function, bits=bits)
        )
        yield from _copied(op.formatted_name, f"autocast {dtype_name(kind)}", index, given, make)


def _of_sparse_layouts(op: Any, dtype: torch.dtype, *, bits: bool) -> Iterator[Case]:
    for layout in _SPARSE_LAYOUTS:
        variant = str(layout).removeprefix("torch.")
        for index, sample in enumerate(sparse_samples(op, layout, dtype)):
            given = (sample.input, sample.args, sample.kwargs)
            yield from _copied(op.formatted_name, variant, index, given, _call(op.op, bits=bits))


def _copied(
    name: str, variant: str, index: int, given: Any, make: Callable[[Snapshot], Run]
) -> Iterator[Case]:
    try:
        snapshot = Snapshot(given, stays=given[1] if name in KEPT_ON_CPU else ())
    except CannotCopy as reason:
        yield Case(variant, index, _unsupported(reason))
        return
    touches_device = bool(tensors_in(given)) or "device" in given[2]
    yield Case(variant, index, make(snapshot), snapshot.has_sparse, says_where=touches_device)


def _unsupported(reason: CannotCopy) -> Run:
    def run(device: str) -> Execution:
        raise reason

    return run


def _call(function: Function, *, bits: bool = True, requires_grad: bool = True) -> Callable[[Snapshot], Run]:
    def make(snapshot: Snapshot) -> Run:
        def run(device: str) -> Execution:
            given = snapshot.build(device, requires_grad=requires_grad)
            first, args, kwargs = given
            result = function(first, *args, **kwargs)
            return Execution(lambda: observe(given, [("result", result)], contents=bits))

        return run

    return make


def _differentiate(function: Function, select: Function) -> Callable[[Snapshot], Run]:
    """First-order gradients of all differentiable results for all arguments that ask for one."""

    def make(snapshot: Snapshot) -> Run:
        def run(device: str) -> Execution:
            given = snapshot.build(device)
            first, args, kwargs = given
            outputs = [t for t in tensors_in(select(function(first, *args, **kwargs))) if t.requires_grad]
            inputs = [t for t in tensors_in(given) if t.requires_grad]
            if not outputs or not inputs:
                return Execution(lambda: observe((), []))
            directions = [_direction(output, number) for number, output in enumerate(outputs)]
            gradients = torch.autograd.grad(outputs, inputs, directions, allow_unused=True)
            return Execution(lambda: observe(given, [("gradient", gradients)]))

        return run

    return make


def _direction(output: torch.Tensor, number: int) -> torch.Tensor:
    """The same numbers on both sides, whatever was drawn before."""
    generator = torch.Generator().manual_seed(number)
    dtype = torch.complex128 if output.is_complex() else torch.float64
    return torch.randn(output.shape, dtype=dtype, generator=generator).to(output.dtype).to(output.device)


def _out_cases(op: Any, given: Any, index: int, *, bits: bool) -> Iterator[Case]:
    """`out=` as it should be, empty so that it has to be resized, and with other strides."""
    try:
        snapshot = Snapshot(given)
        first, args, kwargs = snapshot.build("cpu", requires_grad=False)
        result = op.op(first, *args, **kwargs)
    except Exception:  # noqa: BLE001 - then there is nothing to give; `forward` compares the error
        return
    is_tuple = isinstance(result, tuple)
    results = list(result) if is_tuple else [result]
    if not all(isinstance(item, torch.Tensor) and item.layout is torch.strided for item in results):
        return
    for form, make in enumerate(_OUT_FORMS):
        outs = tuple(make(item.detach()) for item in results)
        whole = Snapshot((given, outs if is_tuple else outs[0]))
        run = _call_with_out(op.op, whole, bits=bits)
        yield Case("out", index * len(_OUT_FORMS) + form, run, whole.has_sparse)


def _filled(result: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(result, memory_format=torch.contiguous_format)


def _empty(result: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=result.dtype)


def _strided(result: torch.Tensor) -> torch.Tensor:
    """Dimensions in the opposite order, with a gap behind each element and an offset."""
    shape = [2 * size for size in reversed(result.shape)]
    whole = torch.ones([size + 1 for size in shape] or [2], dtype=result.dtype)
    if not shape:
        return whole[1]
    return whole[tuple(slice(1, None, 2) for _ in shape)].permute(*reversed(range(len(shape))))


_OUT_FORMS = (_filled, _empty, _strided)


def _call_with_out(function: Function, snapshot: Snapshot, *, bits: bool) -> Run:
    def run(device: str) -> Execution:
        given, out = snapshot.build(device, requires_grad=False)
        first, args, kwargs = given
        result = function(first, *args, **kwargs, out=out)
        return Execution(lambda: observe((given, out), [("result", result)], contents=bits))

    return run
