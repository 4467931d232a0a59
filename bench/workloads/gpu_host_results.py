"""Which operators of PyTorch's database give results in host memory for tensors of the GPU, in JSON."""

import json
from collections import Counter
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SAMPLES = 4
found: Counter[str] = Counter()
ran = 0


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Look(TorchDispatchMode):
    """Counts the operators that take a tensor of the GPU and give one of the host."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if any(t.is_cuda for t in tensors((args, kwargs))) and not all(t.is_cuda for t in tensors(out)):
            found[str(function)] += 1
        return out


def run(op: Any, sample: Any) -> None:
    with Look():
        out = op(sample.input, *sample.args, **sample.kwargs)
        totals = [t.sum() for t in tensors(out) if t.requires_grad]
        if totals:
            sum(t.real if t.is_complex() else t for t in totals).backward()  # type: ignore[union-attr]


for op in op_db:
    for dtype in (torch.float32, torch.float16, torch.int64):
        if dtype not in op.dtypesIfCUDA:
            continue
        gradients = dtype.is_floating_point and op.supports_autograd
        try:
            samples = op.sample_inputs("cuda", dtype, requires_grad=gradients)
            for sample, _ in zip(samples, range(SAMPLES), strict=False):
                run(op, sample)
                ran += 1
        except Exception as problem:  # what a database's sample cannot do here is not asked about
            if "CUDA error" in str(problem):
                raise
print(json.dumps({"samples": ran, "host_results": found}))
