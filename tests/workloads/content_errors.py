"""Natively: which operators of PyTorch's database raise by what their tensors hold, after a good call.

Prints `RESULT` and {operator: [class and beginning of one error]}.
"""

from __future__ import annotations

import itertools
import json
import warnings
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

BAD = (float("nan"), float("inf"), 0.0, -1.0, 1e30)


class WhoRaised(TorchDispatchMode):
    name = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            self.name = self.name or func.name()
            raise


def holding(value: float, given: Any) -> Any:
    dense = isinstance(given, torch.Tensor) and given.layout == torch.strided
    if dense and (given.is_floating_point() or given.is_complex()):
        return torch.full_like(given.detach(), value)
    return given


def main() -> None:
    warnings.simplefilter("ignore")
    found: dict[str, str] = {}
    for op, dtype in itertools.product(op_db, (torch.float32, torch.complex64, torch.int64)):
        if dtype not in op.dtypes:
            continue
        try:
            samples = list(itertools.islice(op.sample_inputs("cpu", dtype), 6))
        except Exception:  # noqa: BLE001 - some need what is not here
            continue
        for sample in samples:
            arguments = (sample.input, sample.args, sample.kwargs)
            for value in (None, *BAD):
                given = arguments
                if value is not None:
                    given = tree_map(lambda item, value=value: holding(value, item), arguments)
                who = WhoRaised()
                try:
                    with who:
                        op(given[0], *given[1], **given[2])
                except Exception as error:  # noqa: BLE001 - that it raises is what is looked for
                    if value is None:
                        break  # it is not the content
                    if who.name:  # else PyTorch's Python looked at a value that it had read
                        found.setdefault(who.name, f"{type(error).__name__}: {str(error)[:80]}")
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main()
