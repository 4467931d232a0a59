"""Train a small convolutional network on scikit-learn's bundled digits (1,797 images of 8 x 8 pixels).

python examples/digits_convnet.py --device cpu
torchrun --nproc-per-node 2 examples/digits_convnet.py
"""

import argparse
import json
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ConvNet(nn.Module):
    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
        )
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.features(images).flatten(1)))


def make_loader(args: argparse.Namespace, rank: int, world_size: int) -> DataLoader:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    dataset = TensorDataset(images, torch.tensor(digits.target))
    generator = torch.Generator().manual_seed(args.seed)
    sampler = None
    if world_size > 1:
        sampler = DistributedSampler(dataset, world_size, rank, shuffle=True, seed=args.seed)
    return DataLoader(
        dataset,
        batch_size=args.batch_size,
        shuffle=sampler is None,
        sampler=sampler,
        generator=generator,
        drop_last=True,
        pin_memory=args.device == "cuda",
    )


def endless(loader: DataLoader) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Epoch after epoch, each in its own order."""
    epoch = 0
    while True:
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def hexadecimal(loss: float) -> str:
    """The 32-bit pattern of a loss, so that two runs can be compared bit for bit."""
    return struct.pack(">f", loss).hex()


def per_rank(path: Path, rank: int) -> Path:
    return path if rank == 0 else path.with_name(f"{path.name}.rank{rank}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=64, help="per rank")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--losses", type=Path, help="write each step's loss, as hexadecimal bits")
    parser.add_argument("--timings", type=Path, help="write each step's seconds, as JSON")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))

    if args.device == "cuda":
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
    else:
        device = torch.device("cpu")
    if world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    torch.manual_seed(args.seed)
    model = ConvNet(args.width, args.dropout).to(device)
    torch.manual_seed(args.seed + 1 + rank)  # from here on, dropout differs between ranks
    train_model: nn.Module = model
    if world_size > 1:
        train_model = DistributedDataParallel(
            model, device_ids=[local_rank] if device.type == "cuda" else None
        )
    optimizer = torch.optim.SGD(train_model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    batches = endless(make_loader(args, rank, world_size))

    losses: list[float] = []
    seconds: list[float] = []
    correct = torch.zeros((), dtype=torch.long, device=device)
    for step in range(args.steps):
        begin = time.perf_counter()
        images, labels = (part.to(device, non_blocking=True) for part in next(batches))
        logits = train_model(images)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        correct += (logits.argmax(dim=1) == labels).sum()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
        if rank == 0 and (step + 1) % args.log_every == 0:
            recent = seconds[-args.log_every :]
            accuracy = correct.item() / (args.log_every * args.batch_size)
            correct.zero_()
            print(
                f"step {step + 1:5d}  loss {losses[-1]:.4f}  accuracy {accuracy:.3f}  "
                f"{1000 * sum(recent) / len(recent):.1f} ms/step",
                flush=True,
            )

    if args.losses:
        per_rank(args.losses, rank).write_text("".join(f"{hexadecimal(loss)}\n" for loss in losses))
    if args.timings:
        per_rank(args.timings, rank).write_text(json.dumps(seconds))
    if world_size > 1:
        # No rank leaves while another still talks to it.
        dist.barrier(device_ids=[local_rank] if device.type == "cuda" else None)
        del train_model  # PyTorch 2.13 may hang where it is what frees the process group at last
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
