"""A training on a DataLoader with understudy.data's sampler, which goes on where an export ends."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from understudy.data import ResumableSampler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--resume", type=Path, help="what recoveryctl snapshots export has written")
    parser.add_argument("--out", type=Path, required=True, help="a line for each step, of each rank")
    given = parser.parse_args()
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if world > 1:
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(5)
    inputs = torch.randn(330, 24)
    data = TensorDataset(inputs, (inputs[:, 0] > 0).long(), torch.arange(330))
    model = torch.nn.Sequential(torch.nn.Linear(24, 60), torch.nn.ReLU(), torch.nn.Linear(60, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    sampler = ResumableSampler(data, global_batch=16, seed=3)
    if given.resume:
        model.load_state_dict(torch.load(given.resume / "model.pt"))
        optimizer.load_state_dict(torch.load(given.resume / "optimizer.pt"))
        position = json.loads((given.resume / "data.json").read_text())
        sampler.load_state_dict(position["ranks"][rank][0]["sampler"])
    trained: torch.nn.Module = DistributedDataParallel(model) if world > 1 else model
    loader = DataLoader(data, batch_sampler=sampler.batches, num_workers=1, persistent_workers=True)
    with given.out.with_name(f"{given.out.name}-{rank}").open("w") as file:
        for step in sampler.steps(loader, until=given.steps):
            x, y, ids = step.batch
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(trained(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            file.write(f"{step.global_step} {loss.item().hex()} {ids.tolist()}\n")
            file.flush()
    if world > 1:
        torch.distributed.barrier()


main()
