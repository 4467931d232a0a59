"""Train so that a restarted run goes on with exactly the next sample, on as many ranks as there are then.

    python examples/resumable_data.py run
    torchrun --nproc-per-node 2 --max-restarts 3 examples/resumable_data.py run
    python -m understudy.data check run

Kill it whenever you like and start it again: it goes on behind the newest checkpoint in `run`. The number of
ranks may be another one, as long as it divides the global batch.
"""

import argparse
import os
import struct
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from understudy.data import ResumableSampler, SampleLog, StatePack, overlapped


def make_dataset(size: int) -> TensorDataset:
    """Points in a square, whether each lies in a circle, and its id: the log has what really arrived."""
    points = 2 * torch.rand(size, 2, generator=torch.Generator().manual_seed(0)) - 1
    return TensorDataset(points, (points.norm(dim=1) < 0.8).float(), torch.arange(size))


def hexadecimal(loss: float) -> str:
    """The 32-bit pattern of a loss, so that two runs can be compared bit for bit."""
    return struct.pack(">f", loss).hex()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="checkpoints and logs; all ranks see it")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--global-batch", type=int, default=32, help="over all ranks")
    parser.add_argument("--checkpoint-every", type=int, default=50, help="steps")
    parser.add_argument("--workers", type=int, default=2, help="processes of each rank that read ahead")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if world_size > 1 else 0

    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1), nn.Flatten(0))
    torch.manual_seed(args.seed + 1 + rank)  # from here on, dropout differs between ranks
    train_model = DistributedDataParallel(model) if world_size > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    dataset = make_dataset(args.samples)
    sampler = ResumableSampler(dataset, args.global_batch, seed=args.seed)
    loader = DataLoader(
        dataset,
        batch_sampler=sampler.batches,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
    )
    log = SampleLog(args.run, sampler)
    with StatePack(
        args.run, model=model, optimizer=optimizer, sampler=sampler, strategy=overlapped(max_in_flight=4)
    ) as pack:
        start = pack.load()
        if rank == 0:
            print(
                f"goes on behind step {start.step}" if start else "begins",
                f"on {world_size} ranks",
                flush=True,
            )

        for step in sampler.steps(loader, until=args.steps):
            points, inside, ids = step.batch
            loss = nn.functional.binary_cross_entropy_with_logits(train_model(points), inside)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.record(step.epoch, step.step, ids)
            if rank == 0:
                print(
                    f"step {step.global_step + 1}  loss {loss.item():.4f}  {hexadecimal(loss.item())}",
                    flush=True,
                )
            if sampler.global_step % args.checkpoint_every == 0:
                log.sync()
                pack.save(sampler.global_step)
    log.close()
    if world_size > 1:
        dist.barrier()  # no rank leaves while another still talks to it
        del train_model  # PyTorch 2.13 may hang where it is what frees the process group at last
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
