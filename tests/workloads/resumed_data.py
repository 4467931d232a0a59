"""A training that goes on from its checkpoints, and may kill itself in the middle of a step.

Appends each loss as bits to losses-rank….txt, as `step bits`. Dropout and noise draw from every generator.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from leaves_at_once import leave
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from understudy.data import Overlapped, ResumableSampler, SampleLog, StatePack, blocking

SIZE, GLOBAL_BATCH, EVERY = 22, 4, 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--overlapped", action="store_true")
    parser.add_argument("--sharded", action="store_true", help="a model of each rank's own")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--kill", type=int, nargs=2, metavar=("RANK", "STEP"), default=(-1, -1))
    given = parser.parse_args()
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(5 + rank * given.sharded)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 8), torch.nn.LayerNorm(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
    )
    torch.manual_seed(100 + rank)
    random.seed(200 + rank)
    trained = DistributedDataParallel(model) if world > 1 and not given.sharded else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    dataset = TensorDataset(torch.arange(3.0 * SIZE).view(SIZE, 3) / SIZE, torch.arange(SIZE))
    sampler = ResumableSampler(dataset, GLOBAL_BATCH, seed=3)
    loader = DataLoader(dataset, batch_sampler=sampler.batches, num_workers=given.workers)
    pack = StatePack(
        given.run, model=trained, optimizer=optimizer, scheduler=scheduler, sampler=sampler,
        sharded=given.sharded, grace=1.0, strategy=Overlapped() if given.overlapped else blocking,
    )  # fmt: skip
    log = SampleLog(given.run, sampler)
    losses = os.open(given.run / f"losses-rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    pack.load()
    for step in sampler.steps(loader, given.steps):
        values, ids = step.batch
        loss = trained(values * random.random()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if (rank, step.global_step) == tuple(given.kill):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        scheduler.step()
        log.record(step.epoch, step.step, ids)
        os.write(losses, f"{step.global_step} {loss.item().hex()}\n".encode())
        if sampler.global_step % EVERY == 0:
            pack.save(sampler.global_step)
    pack.close()
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main()
