"""op_db in FakeTensorMode: what shape propagation, export and compilation see of the virtual device.

`python fake_operators.py FILE`: results and gradients of fake tensors beside those of the device. FILE gets a
line "begin NAME" before, and one of JSON after each entry, so that it names an entry that ends the process.
"""

import json
import sys
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

SAMPLES = 4
DEPENDS_ON_CONTENT = (DataDependentOutputException, DynamicOutputShapeException)


def described(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value if isinstance(value, (int, bool, str)) else type(value).__name__
    text = [str(value.dtype), list(value.shape), value.device.type, str(value.layout).removeprefix("torch.")]
    return [*text, list(value.stride()), value.storage_offset()] if value.layout is torch.strided else text


def moved(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cuda", 0)
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().cuda().requires_grad_(value.requires_grad)


def run(op: Any, sample: Any) -> list[Any]:
    result = op(sample.input, *sample.args, **sample.kwargs)
    found = [described(leaf) for leaf in tree_leaves(result)]
    outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    inputs = [
        t
        for t in tree_leaves((sample.input, sample.args, sample.kwargs))
        if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    if outputs and inputs:
        ones = [torch.ones_like(output) for output in outputs]
        found += [described(g) for g in torch.autograd.grad(outputs, inputs, ones, allow_unused=True)]
    return found


def outcome(op: Any, sample: Any) -> list[Any]:
    try:
        return run(op, sample)
    except DEPENDS_ON_CONTENT:
        return ["depends on content"]
    except Exception as error:  # noqa: BLE001 - both are to raise it
        return [type(error).__name__, str(error).splitlines()[0] if str(error) else ""]


def compare(op: Any) -> tuple[int, list[Any]]:
    dtype = next(
        (t for t in (torch.float32, torch.complex64, torch.int64, torch.bool) if t in op.dtypes), None
    )
    if dtype is None:
        return 0, []
    gradients = op.supports_autograd and dtype.is_floating_point
    count, different = 0, []
    for sample in islice(op.sample_inputs("cpu", dtype, requires_grad=gradients), SAMPLES):
        real = sample.transform(moved)
        if any(t.layout is not torch.strided for t in tree_leaves(real) if isinstance(t, torch.Tensor)):
            continue  # PyTorch has no fakes of most of these
        mode = FakeTensorMode()
        fake = real.transform(lambda v, mode=mode: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v)
        with mode:
            seen = outcome(op, fake)
        given = outcome(op, real)
        count += 1
        if seen != given and seen != ["depends on content"]:
            different.append([seen, given])
    return count, different


def main() -> None:
    warnings.filterwarnings("ignore")
    with Path(sys.argv[1]).open("a", buffering=1) as out:
        for op in op_db:
            name = f"{op.name} {op.variant_test_name}".strip()
            out.write(f"begin {name}\n")
            count, different = compare(op)
            out.write(json.dumps([name, count, different]) + "\n")


main()
