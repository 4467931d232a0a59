"""Train on MNIST, be killed, go on: `python examples/resumable_mnist.py DIRECTORY --data MNIST`.

The experiment of paper 000 §4: a plain training, with hints at the end of each iteration and of each epoch.
MNIST is a folder with the test images as they are distributed (t10k-images-idx3-ubyte.gz and their labels).
Kill it whenever you like and call it again: it goes on behind its newest checkpoint, and its weights are
those of a training that never stopped, bit for bit.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import logging
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from understudy.hints import checkpoint, checkpoints

BATCH = 64
HELD_BACK = 1000
"""Images that are not trained on, but asked about after each epoch."""


def read(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The images, bytes [10000, 1, 28, 28], and which digits they are."""
    images = gzip.decompress((folder / "t10k-images-idx3-ubyte.gz").read_bytes())[16:]
    labels = gzip.decompress((folder / "t10k-labels-idx1-ubyte.gz").read_bytes())[8:]
    pixels = torch.frombuffer(bytearray(images), dtype=torch.uint8).reshape(-1, 1, 28, 28)
    return pixels, torch.tensor(list(labels))


def train(
    images: torch.Tensor, labels: torch.Tensor, epochs: int, seed: int
) -> tuple[list[float], list[torch.Tensor]]:
    """Which part of the images held back is told right after each epoch, and the weights in the end."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.25), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    right = []
    for _ in range(epochs):
        model.train()
        for batch in torch.randperm(len(images) - HELD_BACK).split(BATCH):
            loss = F.cross_entropy(model(images[batch].float() / 255), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoint()
        model.eval()
        with torch.no_grad():
            told = model(images[-HELD_BACK:].float() / 255).argmax(1)
        right.append((told == labels[-HELD_BACK:]).float().mean().item())
        checkpoint()
    return right, [each.detach() for each in model.state_dict().values()]


def digest(weights: list[torch.Tensor]) -> str:
    """Of their bits."""
    found = hashlib.blake2b(digest_size=8)
    for each in weights:
        found.update(each.contiguous().numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("directory", help="where its checkpoints lie")
    parser.add_argument("--data", type=Path, required=True, help="the folder of MNIST")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--overhead", type=float, default=0.05, help="of the time, for checkpoints")
    parser.add_argument("--failure-rate", type=float, default=1 / 3600, help="per second")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)  # as in the paper
    decorate = checkpoints(
        directory=arguments.directory, overhead=arguments.overhead, failure_rate=arguments.failure_rate
    )
    pixels, digits = read(arguments.data)
    right, weights = decorate(train)(
        pixels[: arguments.images], digits[: arguments.images], arguments.epochs, arguments.seed
    )
    print("right", *(f"{part:.3f}" for part in right), " weights", digest(weights))
