"""Tensor parallelism with attention on DTensors, whose shapes PyTorch propagates by fake tensors.

`python tensor_parallel_attention.py cuda`: under a launcher; `alone`: the same on the CPU without any of it.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

SHARDED = sys.argv[1] == "cuda"
DEVICE = "cuda" if SHARDED else "cpu"
HEADS, WIDTH, LENGTH = 4, 32, 5


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mask: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, self.mask, is_causal=self.mask is None)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


if SHARDED:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.manual_seed(1)
model = torch.nn.Sequential(Block(), Block()).to(DEVICE)
model[1].mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=DEVICE).tril(1)
rank = 0
if SHARDED:
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(DEVICE, (1, world), mesh_dim_names=("data", "tensor"))
    model[1].mask = distribute_tensor(model[1].mask, mesh["tensor"], [Replicate()])
    for block in model:
        columns = {name: ColwiseParallel(use_local_output=False) for name in ("q", "k", "v")}
        parallelize_module(block, mesh["tensor"], {**columns, "out": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=True)
for step in range(8):
    x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step)).to(DEVICE)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{rank} {step} {loss.item().hex()}\n", end="", flush=True)  # in one piece
for name, parameter in model.named_parameters():
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    print(f"{rank} {name} {torch.hash_tensor(local.cpu()).item()}\n", end="", flush=True)
if SHARDED:
    dist.destroy_process_group()
