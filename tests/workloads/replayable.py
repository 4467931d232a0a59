"""A training with dropout, Adam and a schedule, whose data and seeds depend on the step alone."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(16, 24, generator=generator), torch.randint(0, 5, (16,), generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--resume", type=Path, help="what an export wrote")
    parser.add_argument("--losses", type=Path, help="one line a step, as it ends")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that each step's data take")
    parser.add_argument("--hold", type=int, help="stand still behind this step")
    given = parser.parse_args()
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Linear(24, 300), torch.nn.LayerNorm(300), torch.nn.Dropout(0.2), torch.nn.Linear(300, 5)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    first = 1
    if given.resume:
        model.load_state_dict(torch.load(given.resume / "model.pt"))
        optimizer.load_state_dict(torch.load(given.resume / "optimizer.pt"))
        scheduler.load_state_dict(torch.load(given.resume / "scheduler.pt"))
        scheduler.step()  # its state is that right behind the optimizer's step
        first = json.loads((given.resume / "snapshot.json").read_text())["step"] + 1
    trained: torch.nn.Module = model
    if world > 1:
        torch.distributed.init_process_group("nccl")
        trained = DistributedDataParallel(model)
    with open(given.losses if given.losses and rank == 0 else os.devnull, "w", buffering=1) as losses:
        for step in range(first, given.steps + 1):
            time.sleep(given.pace)  # a data loader
            torch.cuda.manual_seed(1000 * step + rank)
            inputs, labels = (tensor.to(device) for tensor in batch(step, rank))
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(trained(inputs), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.write(f"{step} {loss.item().hex()}\n")
            if step == given.hold:
                signal.pause()
    if world > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
