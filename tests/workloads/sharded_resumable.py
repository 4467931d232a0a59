"""A training whose parameters and optimizer state lie on all ranks; its data depend on the step alone."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def whole(value: Any) -> Any:
    """What all ranks together hold."""
    if isinstance(value, DTensor):
        return value.full_tensor().cpu()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return value


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save", type=Path, help="the state right behind the last step of the optimizer")
    given = parser.parse_args()
    rank = int(os.environ["RANK"])
    native = not torch.cuda.is_available()
    device = torch.device("cpu") if native else torch.device("cuda", rank)
    if not native:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if native else "nccl")
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(24, 37), nn.LayerNorm(37), nn.ReLU(), nn.Linear(37, 5)).to(device)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 50], gamma=0.5)
    for step in range(1, given.steps + 1):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        inputs = torch.randn(16, 24, generator=generator).to(device)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        if step == given.steps and given.save:
            state = {
                "model": whole(model.state_dict()),
                "optimizer": {
                    "state": whole(optimizer.state_dict()["state"]),
                    "param_groups": optimizer.state_dict()["param_groups"],
                },
                "scheduler": scheduler.state_dict(),
            }
            if rank == 0:
                torch.save(state, given.save)
        scheduler.step()
    dist.barrier()
    dist.destroy_process_group()


main()
