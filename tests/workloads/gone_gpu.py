"""Two ranks; in the fourth step the simulated GPU of the first is gone for all processes, as argv[1] says.

argv[2], if it is there, is what NVML tells of that GPU from then on.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

HOW, STEPS, GONE_STEP, TOLD = sys.argv[1], 7, 4, sys.argv[2:]
dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
torch.manual_seed(0)
layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).cuda()
model = DistributedDataParallel(layers, device_ids=[rank])
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for step in range(1, STEPS + 1):
    loss = model(torch.randn(2, 8, device="cuda") + rank).square().mean()
    if rank == 0 and step == GONE_STEP and HOW != "stays":
        loss.item()  # behind the last step's commit: an error that is first met by its digests ends the job
        for line in TOLD:
            gpu = Path(os.environ["STAND_IN_NVML"], "GPU-00000000-0000")
            while not gpu.with_name(f"{gpu.name}.asked").exists():
                time.sleep(0.01)  # until proxyd knows what it told before
            gpu.write_text(f"{line}\n")
        Path(os.environ["SIMULATED_CUDA_GONE"], "0").write_text(HOW)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 1:
        print(f"step {step} {loss.item().hex()}\n", end="", flush=True)  # in one piece
del model
dist.destroy_process_group()
