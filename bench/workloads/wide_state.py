"""Trains little beside much state that all ranks share, as a model with frozen weights does."""

import argparse
import json
import os
import struct
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def per_rank(path: Path, rank: int) -> Path:
    return path if rank == 0 else path.with_name(f"{path.name}.rank{rank}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--bytes", type=int, required=True, help="of shared state")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--losses", type=Path, required=True)
    parser.add_argument("--timings", type=Path, required=True)
    arguments = parser.parse_args()
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank) if arguments.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(1)
    frozen = torch.randn(arguments.bytes // 4, device=device)
    model = DistributedDataParallel(
        nn.Linear(64, 64).to(device), device_ids=[rank] if device.type == "cuda" else None
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses, seconds = [], []
    for step in range(arguments.steps):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = model(frozen[64 * step : 64 * (step + 1)].unsqueeze(0)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    text = "".join(f"{struct.pack('>f', loss).hex()}\n" for loss in losses)
    per_rank(arguments.losses, rank).write_text(text)
    per_rank(arguments.timings, rank).write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
