"""Two ranks, of which the first comes late once: the other one waits so many seconds in a collective."""

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

LATE_S, STEPS, LATE_STEP = float(sys.argv[1]), 6, 4
dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 4).cuda(), device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(STEPS):
    if rank == 0 and step == LATE_STEP:
        time.sleep(LATE_S)
    loss = model(torch.full((2, 8), 1.0 + rank, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 1:
        print(f"step {step + 1} {loss.item()}", flush=True)
del model
dist.destroy_process_group()
