"""Train so that a job whose rank fails goes on at the step at which it failed, with nothing saved before.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # PyTorch 2.13 would reuse a failed attempt's addresses
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/jit_checkpoint.py ckpt
    python -m understudy.jit check ckpt

Kill a rank whenever you like: the other one saves what both have, `torchrun` starts both again, and the
losses go on as if nothing had been. Give it another directory to begin anew.
"""

import argparse
import struct
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

import understudy.jit as jit


def hexadecimal(loss: float) -> str:
    """The 32-bit pattern of a loss, so that two runs can be compared bit for bit."""
    return struct.pack(">f", loss).hex()


def batch_of(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points in a square, and whether each lies in a circle; the step says which ones."""
    points = 2 * torch.rand(size, 2, generator=torch.Generator().manual_seed(1000 * step + rank)) - 1
    return points, (points.norm(dim=1) < 0.8).float()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where ranks save when one fails; all ranks see it")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16, help="of each rank")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=1800.0, help="of collectives, in seconds")
    parser.add_argument("--minimum-stall", type=float, default=30.0, help="seconds; a shorter one is no hang")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
    rank = dist.get_rank()

    torch.manual_seed(args.seed)
    model = nn.Sequential(
        nn.Linear(2, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1), nn.Flatten(0)
    )
    torch.manual_seed(args.seed + 1 + rank)  # from here on, dropout differs between ranks
    train_model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    def save(path: Path) -> None:
        torch.save({name: part.state_dict() for name, part in parts.items()}, path)

    jit.init(save, args.directory, job="circle", minimum_stall=args.minimum_stall)
    if (path := jit.get_checkpoint_path()) is not None:
        state = torch.load(path, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        jit.restore_generators()
    start = jit.completed_steps()
    if rank == 0:
        print(f"goes on behind step {start}" if start else "begins", flush=True)

    for step in range(start, args.steps):
        points, inside = batch_of(step, rank, args.batch)
        loss = nn.functional.binary_cross_entropy_with_logits(train_model(points), inside)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if rank == 0:
            print(f"step {step + 1}  loss {loss.item():.4f}  {hexadecimal(loss.item())}", flush=True)
        jit.boundary()  # this step is complete: from here on, it is what a save would write

    dist.barrier()  # no rank leaves while another still talks to it
    jit.close()
    del train_model  # PyTorch 2.13 may hang where it is what frees the process group at last
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
