"""Trains; then the process becomes another program (exec), which trains on from what the first one saved."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

folder, turns = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
rank = int(os.environ["RANK"])
device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
torch.manual_seed(turns)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4).to(device))
optimizer = torch.optim.Adam(model.parameters())
saved = folder / f"{rank}.pt"
if turns > 1:
    kept = torch.load(saved, map_location=device)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
with (folder / str(rank)).open("a") as told:
    for step in range(6):
        optimizer.zero_grad()
        loss = model(torch.full((2, 8), float(step + rank), device=device)).square().mean()
        loss.backward()
        optimizer.step()
        print(turns, step, loss.item().hex(), file=told)
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
model(torch.ones(2, 8, device=device))  # nobody waits for it
if turns == 1:
    dist.barrier()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    os.execv(sys.executable, [sys.executable, __file__, str(folder), str(turns + 1)])
dist.destroy_process_group()
