"""Trains a small model on NCCL communicators of one rank, which one GPU is enough for; digests of every step.

torchrun --standalone --nproc-per-node 1 bench/workloads/lone_nccl.py --steps 20 --losses FILE --timings FILE
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def collectives(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """One of each kind."""
    gathered = [torch.empty_like(x)]
    dist.all_gather(gathered, x, group=group)
    scattered = torch.empty_like(x)
    dist.reduce_scatter_tensor(scattered, x, group=group)
    exchanged = torch.empty_like(x)
    dist.all_to_all_single(exchanged, x, group=group)
    dist.broadcast(x, 0, group=group)
    work = dist.all_reduce(x, group=group, async_op=True)
    assert work is not None
    work.wait()
    dist.barrier(group=group)
    return gathered[0] + scattered + exchanged + x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--losses", type=Path, required=True)
    parser.add_argument("--timings", type=Path, required=True)
    asked = parser.parse_args()
    device = torch.device(asked.device, int(os.environ["LOCAL_RANK"]) if asked.device == "cuda" else None)
    if asked.device == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if asked.device == "cuda" else "gloo")
    second = dist.new_group([0])
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)).to(device)
    torch.manual_seed(
        8
    )  # the device's generator; natively on the CPU it is the one that the model was made by
    trained = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    losses, seconds = [], []
    for _ in range(asked.steps):
        begin = time.perf_counter()
        x = torch.randn(32, 64, device=device)
        loss = (trained(x) - collectives(x.clone(), second)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        seconds.append(time.perf_counter() - begin)
    dist.destroy_process_group(second)
    dist.destroy_process_group()
    asked.losses.write_text("\n".join(losses) + "\n")
    asked.timings.write_text(json.dumps(seconds))


if __name__ == "__main__":
    main()
