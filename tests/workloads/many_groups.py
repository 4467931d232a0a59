"""Trains with forty process groups that take turns, and writes down every bit of what it gets.

many_groups.py FOLDER
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

GROUPS, STEPS = 40, 10

rank = int(os.environ["RANK"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl")
groups = [dist.new_group([0, 1]) for _ in range(GROUPS)]
torch.manual_seed(1)
model = nn.Linear(16, 16).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
inputs = (torch.arange(64.0, device=device).reshape(4, 16) + rank) / 64
lines = []
for step in range(STEPS):
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    loss.backward()
    for turn in range(8):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, group=groups[(8 * step + turn) % GROUPS])
    optimizer.step()
    lines.append(
        " ".join(f"{value:x}" for value in model.weight.detach().view(torch.int32).flatten().tolist())
    )
Path(sys.argv[1], str(rank)).write_text("\n".join(lines))
dist.destroy_process_group()
