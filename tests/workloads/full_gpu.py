"""Two ranks whose parameters take argv[1] MiB, and as much again twice for Adam; print losses as bits."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

MIB, STEPS = int(sys.argv[1]), 8
dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(512, MIB * 512).cuda(), device_ids=[rank])
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(1, STEPS + 1):
    loss = model(torch.randn(2, 512, device="cuda") + rank).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"rank {rank} step {step} {loss.item().hex()}\n", end="", flush=True)  # in one piece
del model
dist.destroy_process_group()
