"""Two ranks: every collective with every type of element and every reduction, and what came of each.

Prints RESULT and a JSON object {"all_reduce SUM float32": "as expected" or an exception's class and text},
and a sum afterwards: NCCL refuses some of these at the call, and a script that catches that goes on.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")
TYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex128, torch.complex64, torch.complex32, torch.int8, torch.uint8, torch.int16, torch.uint16,
    torch.int32, torch.uint32, torch.int64, torch.uint64, torch.bool,
)  # fmt: skip
MOVED = (2.0, 0.0, 1.0, 3.0)
ADDED = (1.0, 0.0, 1.0, 1.0)
OPERATIONS = {
    "SUM": lambda a: a + a, "AVG": lambda a: a, "PRODUCT": lambda a: a * a, "MIN": lambda a: a,
    "MAX": lambda a: a, "BAND": lambda a: a, "BOR": lambda a: a, "BXOR": lambda a: a ^ a,
}  # fmt: skip


def of(values: tuple[float, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).to(dtype).to(device)


def bytes_of(tensor: torch.Tensor) -> list[int]:
    return tensor.cpu().contiguous().view(torch.uint8).tolist()


def reduced(
    into: Callable[[torch.Tensor, dist.ReduceOp.RedOpType], torch.Tensor | None],
    name: str,
    dtype: torch.dtype,
) -> bool:
    result = into(of(ADDED, dtype, "cuda"), getattr(dist.ReduceOp, name))
    if result is None:
        return True
    expected = OPERATIONS[name](of(ADDED, dtype, "cpu"))
    return bytes_of(result) == bytes_of(expected[: result.numel()])


def all_reduce(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    dist.all_reduce(tensor, op)
    return tensor


def reduce(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor | None:
    dist.reduce(tensor, 0, op)
    return tensor if dist.get_rank() == 0 else None


def reduce_scatter(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor | None:
    part = torch.empty_like(tensor[:2])
    dist.reduce_scatter_tensor(part, tensor, op)
    return part if dist.get_rank() == 0 else None


def moved(name: str, dtype: torch.dtype) -> bool:
    mine, first = of(MOVED, dtype, "cuda"), dist.get_rank() == 0
    into, halves = torch.empty_like(mine), bytes_of(mine[:2])
    if name == "broadcast":
        dist.broadcast(mine if first else into, 0)
        into = mine if first else into
    elif name == "all_gather":
        dist.all_gather_into_tensor(into, mine[:2])
        return bytes_of(into) == halves + halves
    elif name == "all_to_all":
        dist.all_to_all_single(into, mine)
        half = bytes_of(mine[:2] if first else mine[2:])
        return bytes_of(into) == half + half
    elif name == "gather":
        parts = [torch.empty_like(mine) for _ in range(2)] if first else None
        dist.gather(mine, parts, 0)
        into = parts[1] if parts else mine
    elif name == "scatter":
        dist.scatter(into, [mine.clone(), mine.clone()] if first else None, 0)
    elif first:
        dist.send(mine, 1)
        into = mine
    else:
        dist.recv(into, 0)
    return bytes_of(into) == bytes_of(mine)


def outcome(call: Callable[[], bool]) -> str:
    try:
        return "as expected" if call() else "other values"
    except Exception as problem:  # noqa: BLE001 - whatever it is, it is told
        return f"{type(problem).__name__}: {str(problem).splitlines()[0]}"


def main() -> None:
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    found = {}
    for dtype in TYPES:
        of_type = str(dtype).removeprefix("torch.")
        for call in (all_reduce, reduce, reduce_scatter):
            for name in OPERATIONS:
                what = f"{call.__name__} {name} {of_type}"
                found[what] = outcome(functools.partial(reduced, call, name, dtype))
        for name in ("broadcast", "all_gather", "all_to_all", "gather", "scatter", "send"):
            found[f"{name} - {of_type}"] = outcome(functools.partial(moved, name, dtype))
    last = torch.ones(3, device="cuda")
    dist.all_reduce(last)
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps({"found": found, "afterwards": last.tolist()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
