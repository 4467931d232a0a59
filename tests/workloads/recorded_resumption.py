"""Two ranks on a ResumableSampler, that go on from a checkpoint of their own."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from understudy.data import ResumableSampler

EVERY = 3

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--leave", type=int, default=-1, help="with a failure, once this step was handed out")
given = parser.parse_args()
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
torch.cuda.set_device(device)
torch.distributed.init_process_group("nccl")
torch.manual_seed(5)
inputs = torch.randn(70, 6)
data = TensorDataset(inputs, inputs[:, :1])
model = torch.nn.Linear(6, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
sampler = ResumableSampler(data, global_batch=10, seed=3)
given.folder.mkdir(exist_ok=True)
path = given.folder / f"rank{rank}.pt"
if path.exists():
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    sampler.load_state_dict(state["sampler"])
trained = DistributedDataParallel(model)
loader = DataLoader(data, batch_sampler=sampler.batches, num_workers=1, persistent_workers=True)
for step in sampler.steps(loader, until=given.steps):
    if step.global_step == given.leave:
        os._exit(3)
    x, y = step.batch
    optimizer.zero_grad()
    loss = (trained(x.to(device)) - y.to(device)).square().mean()
    loss.backward()
    optimizer.step()
    if sampler.global_step % EVERY == 0:
        parts = {"model": model, "optimizer": optimizer, "sampler": sampler}
        torch.save({name: part.state_dict() for name, part in parts.items()}, path)
evaluated = TensorDataset(inputs[:9])  # which two ranks cannot share without one twice
for (x,) in DataLoader(evaluated, batch_size=2, sampler=DistributedSampler(evaluated)):
    model(x.to(device))
torch.distributed.barrier()
