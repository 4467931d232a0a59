"""What CUDA computes of an element type and the CPU does not: the device beside the CPU's of a wider type.

`python wider_types.py`: each entry of op_db with the types that only its list for CUDA has, and gradients.
Prints "RESULT {pair: [samples, complaint or '']}".
"""

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

WIDER = {
    torch.bool: torch.uint8,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
ELSEWHERE = ("torch.ops.aten._flash_attention_forward", "torch.ops.aten._efficient_attention_forward")
"""Compared with attention itself, in packed_attention.py."""
WITHOUT_REFERENCE = ("nanmean", "nn.functional.rrelu")
"""It counts by a nansum, and draws random numbers."""
TOLERANCE = 2e-2
"""Of the largest number: composites round to half precision in between."""


def widened(value: Any, integers: bool) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if integers and value in INTEGERS else WIDER.get(value, value)
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to(widened(value.dtype, integers)).requires_grad_(value.requires_grad)


def on_device(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cuda")
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().cuda().requires_grad_(value.requires_grad)


def sum_without_nan(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """nansum, which the CPU does not have of complex numbers."""
    return torch.sum(torch.where(input.isnan(), 0, input), *args, **kwargs)


def compare(ours: Any, reference: Any) -> None:
    for got, wanted in zip(tree_leaves(ours), tree_leaves(reference), strict=True):
        assert got.device.type == "cuda"
        assert got.shape == wanted.shape
        same, exact = got.cpu().to(wanted.dtype), wanted.to(got.dtype).to(wanted.dtype)
        finite = same.isfinite() & exact.isfinite()  # half precision overflows earlier
        if finite.any():
            wrong = (same[finite] - exact[finite]).abs().max().item()
            assert wrong <= TOLERANCE * max(1.0, exact[finite].abs().max().item()), wrong


def check(op: Any, sample: Any) -> None:
    integers = op.name == "histc"
    ours = sample.transform(on_device)
    wide = sample.transform(lambda value: widened(value, integers))
    reference_of: Callable[..., Any] = sum_without_nan if op.name == "nansum" else op
    got = op(ours.input, *ours.args, **ours.kwargs)
    torch.cuda.synchronize()
    if op.name in WITHOUT_REFERENCE:
        return
    wanted = reference_of(wide.input, *wide.args, **wide.kwargs)
    compare(got, wanted)
    if isinstance(got, torch.Tensor) and got.requires_grad:
        (gradient,) = torch.autograd.grad(got, ours.input, torch.ones_like(got))
        (exact,) = torch.autograd.grad(wanted, wide.input, torch.ones_like(wanted))
        compare(gradient, exact)


def pairs() -> Iterator[tuple[str, Callable[[], int]]]:
    for op in op_db:
        for dtype in sorted(set(op.dtypesIfCUDA) - set(op.dtypes), key=str):
            if op.name in ELSEWHERE:
                continue

            def run(op: Any = op, dtype: torch.dtype = dtype) -> int:
                gradients = dtype in op.supported_backward_dtypes("cuda")
                samples = list(op.sample_inputs("cpu", dtype, requires_grad=gradients))
                for sample in samples:
                    check(op, sample)
                return len(samples)

            yield f"{op.name} {op.variant_test_name} {dtype}", run


def main() -> None:
    warnings.filterwarnings("ignore")
    found = {}
    for name, run in pairs():
        try:
            found[name] = [run(), ""]
        except Exception as error:  # noqa: BLE001 - every entry is to be heard
            found[name] = [0, f"{type(error).__name__}: {error}"[:300]]
    sys.stdout.write("RESULT " + json.dumps(found) + "\n")


main()
