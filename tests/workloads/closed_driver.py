"""Looks for a way to a driver that was left open in a worker; prints what it finds as JSON."""

import json
import sys
import types

import torch

cuda_build = sys.modules["proxy_client.cuda_build"]


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


def is_builtin(name: str) -> bool:
    """Whether torch._C still has a C function of its own there."""
    value = getattr(torch._C, name)
    return isinstance(value, types.BuiltinFunctionType) and value.__module__ != "proxy_client._client"


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


def refusals() -> dict[str, str]:
    """What the closed names say."""
    said = {}
    for name in ("_cuda_getAllocator", "_nccl_all_reduce", "_broadcast", "_CUDAGreenContext"):
        try:
            getattr(torch._C, name)()
        except NotImplementedError as refusal:
            said[name] = str(refusal)
    return said


answers = [name for name in dir(torch._C) if name.startswith(("_cuda_", "_nccl_"))]
print(
    json.dumps(
        {
            "loss": train(),
            "kernels": own_kernels_of_cuda(),
            "builtin": [n for n in answers if is_builtin(n)],
            "harmless": sorted(cuda_build._HARMLESS),
            "unknown": [n for n in (*cuda_build._INSTEAD, *cuda_build._HARMLESS) if not hasattr(torch._C, n)],
            "refusals": refusals(),
            "nccl": torch.distributed.ProcessGroupNCCL is torch._C._distributed_c10d._UnderstudyProcessGroup,
        }
    )
)
