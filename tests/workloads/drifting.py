"""Trains with an operator that does not replay: tests/csrc/drifting.cpp, as UNDERSTUDY_TEST_LIBRARY."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = int(sys.argv[1])

torch.ops.load_library(os.environ["UNDERSTUDY_TEST_LIBRARY"])
rank = int(os.environ["RANK"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl")
torch.manual_seed(1)
model = DistributedDataParallel(nn.Linear(8, 4).to(device), device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(STEPS):
    with torch.no_grad():
        inputs = torch.ops.understudy_drift.drifting(torch.ones(2, 8, device=device))
        inputs.sum().item()  # a value that a replay will find to be another
    loss = model(inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss.item()
dist.barrier()
dist.destroy_process_group()
