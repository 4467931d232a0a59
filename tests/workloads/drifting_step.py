"""An optimizer whose step does not replay: tests/csrc/drifting.cpp, as UNDERSTUDY_TEST_LIBRARY."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.ops.load_library(os.environ["UNDERSTUDY_TEST_LIBRARY"])
device = torch.device("cuda", int(os.environ["RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl")
torch.manual_seed(1)
model = DistributedDataParallel(nn.Linear(8, 4).to(device), device_ids=[device.index])


class Drifting(torch.optim.SGD):
    """Keeps something that is another each time."""

    kept = None

    def step(self, closure=None):
        self.kept = torch.ops.understudy_drift.drifting(torch.ones(8, device=device))
        return super().step(closure)


optimizer = Drifting(model.parameters(), lr=0.01)
for _ in range(int(sys.argv[1])):
    loss = model(torch.ones(2, 8, device=device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.6f}")
dist.barrier()
dist.destroy_process_group()
