"""A training that loads what a checkpoint has, and whose data depend on the step alone."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(16, 24, generator=generator), torch.randint(0, 5, (16,), generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--resume", type=Path, help="a directory with model.pt, optimizer.pt, snapshot.json")
    parser.add_argument("--losses", type=Path)
    parser.add_argument("--save", type=Path, help="the state after the last step")
    parser.add_argument("--layers", type=int, default=0, help="more of them: a step takes longer")
    given = parser.parse_args()
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(5)
    more = [layer for _ in range(given.layers) for layer in (torch.nn.Linear(300, 300), torch.nn.ReLU())]
    model = torch.nn.Sequential(
        torch.nn.Linear(24, 300), torch.nn.LayerNorm(300), torch.nn.ReLU(), *more, torch.nn.Linear(300, 5)
    ).to(device)
    first = 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    if given.resume:
        model.load_state_dict(torch.load(given.resume / "model.pt"))
        optimizer.load_state_dict(torch.load(given.resume / "optimizer.pt"))
        first = json.loads((given.resume / "snapshot.json").read_text())["step"] + 1
    trained: torch.nn.Module = model
    if world > 1:
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        trained = DistributedDataParallel(model)
    losses = []
    for step in range(first, given.steps + 1):
        inputs, labels = (tensor.to(device) for tensor in batch(step, rank))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(trained(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    if given.losses and rank == 0:
        given.losses.write_text("\n".join(losses))
    if given.save and rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, given.save)
    if world > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
