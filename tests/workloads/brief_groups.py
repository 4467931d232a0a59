"""Trains with a process group that is made, used and destroyed in every minibatch, and no other collective.

Rank 1 computes more, so that rank 0 is ahead.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

STEPS = int(sys.argv[1])

rank = int(os.environ["RANK"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl")
torch.manual_seed(1)
model = nn.Linear(16, 16).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
inputs = torch.arange(64.0, device=device).reshape(4, 16) / 64
for _ in range(STEPS):
    group = dist.new_group([0, 1])
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
    dist.destroy_process_group(group)
    if rank == 1:
        for _ in range(20):
            inputs = (inputs + 1) - 1
    optimizer.step()
sums = [p.double().sum().item() for p in model.parameters()]
print(f"rank {rank}: {sums} {loss.item()}\n", end="", flush=True)  # in one piece: both ranks write
