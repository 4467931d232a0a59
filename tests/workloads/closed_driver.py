"""Looks for a way to a driver that was left open in a worker; prints what it finds as JSON."""

import json
import sys
import types

import torch
from torch.cuda import comm

from understudy.proxy_client.refusals import REFUSALS, Where

cuda_build = sys.modules["understudy.proxy_client.cuda_build"]


def own_kernels_of_cuda() -> list[str]:
    """Operators of aten for which a kernel of PyTorch's own is still the one that counts."""
    return [
        f"{name} at {key}"
        for key in ("CUDA", "SparseCUDA", "SparseCsrCUDA")
        for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)
        if name.startswith("aten::") and not is_ours(name, key)
    ]


def is_ours(name: str, key: str) -> bool:
    """Whether the first kernel at `key` is one of the client's (later ones are those it replaced)."""
    table = torch._C._dispatch_dump_table(name)
    (line,) = [line for line in table.splitlines() if line.startswith(f"{key}: ")]
    return "proxy_client/csrc/" in line


def is_pytorchs_own(name: str) -> bool:
    """Whether torch._C still has its own C function or class there."""
    value = getattr(torch._C, name)
    if isinstance(value, type):
        return value.__module__.startswith("torch")
    return (
        isinstance(value, types.BuiltinFunctionType) and value.__module__ != "understudy.proxy_client._client"
    )


def train() -> float:
    """Everything that a training step uses: random numbers, streams, events, pinned memory, autocast."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(288, 4),
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    images = torch.randn(4, 3, 8, 8).pin_memory()
    stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        with torch.cuda.stream(stream), torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(images.to("cuda", non_blocking=True)).float().square().mean()
        event.record(stream)
        torch.cuda.current_stream().wait_stream(stream)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.nn.functional.scaled_dot_product_attention(
        *torch.randn(3, 1, 2, 8, 16, device="cuda"), is_causal=True
    )
    return loss.item()


def moved_within_one_device() -> dict[str, bool]:
    """What torch.cuda.comm calls, by the name it has in torch._C: whether one device got the same bits."""
    here = torch.arange(6.0, device="cuda")
    out = {name: torch.empty(6, device="cuda") for name in ("_broadcast_out", "_scatter_out", "_gather_out")}
    moved = {
        "_broadcast": comm.broadcast(here, [0])[0],
        "_broadcast_coalesced": comm.broadcast_coalesced([here], [0])[0][0],
        "_broadcast_out": comm.broadcast(here, out=[out["_broadcast_out"]])[0],
        "_scatter": comm.scatter(here, [0])[0],
        "_scatter_out": comm.scatter(here, out=[out["_scatter_out"]])[0],
        "_gather": comm.gather([here[:2], here[2:]], 0, 0),
        "_gather_out": comm.gather([here[:2], here[2:]], 0, out=out["_gather_out"]),
    }
    right = {name: torch.equal(result, here) for name, result in moved.items()}
    return right | {name: right[name] and torch.equal(filled, here) for name, filled in out.items()}


def refusals() -> dict[str, str]:
    """What the closed names say."""
    said = {}
    for name in ("_cuda_getAllocator", "_CUDAGreenContext", "_CUDAPluggableAllocator"):
        try:
            getattr(torch._C, name)()
        except NotImplementedError as refusal:
            said[name] = str(refusal)
    try:
        comm.broadcast(torch.ones(1, device="cuda"), [0, 1])
    except NotImplementedError as refusal:
        said["_broadcast"] = str(refusal)
    return said


in_tables = {*cuda_build._INSTEAD, *(n for row in REFUSALS if row.where is Where.TORCH_C for n in row.names)}
ways = [name for name in dir(torch._C) if name.startswith(("_cuda_", "_nccl_")) or name in in_tables]
print(
    "RESULT "
    + json.dumps(
        {
            "loss": train(),
            "kernels": own_kernels_of_cuda(),
            "own": [name for name in ways if is_pytorchs_own(name)],
            "one_device": moved_within_one_device(),
            "harmless": sorted(cuda_build._HARMLESS),
            "unknown": [n for n in (*cuda_build._INSTEAD, *cuda_build._HARMLESS) if not hasattr(torch._C, n)],
            "refusals": refusals(),
            "nccl": torch.distributed.ProcessGroupNCCL is torch._C._distributed_c10d._UnderstudyProcessGroup,
        }
    )
)
