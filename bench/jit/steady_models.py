"""Models whose steps are timed with and without `jit`: next to nothing to do, much, many statistics."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from char_gpt import CharGPT

CLASSES, LETTERS, BLOCK = 10, 96, 64


@dataclass(frozen=True)
class Trained:
    """A model in DDP, and one step of it."""

    model: nn.Module
    optimizer: Any
    step: Callable[[], None]


def mlp() -> Trained:
    """Three layers."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    x, y = torch.randn(16, 64), torch.randint(CLASSES, (16,))
    return _trained(model, lambda one: F.cross_entropy(one(x), y))


def gpt() -> Trained:
    """That of the examples, with dropout."""
    model = CharGPT(LETTERS, BLOCK, layers=4, heads=4, width=128, dropout=0.1)
    x, y = torch.randint(LETTERS, (8, BLOCK)), torch.randint(LETTERS, (8, BLOCK))
    return _trained(model, lambda one: one(x, y))


def convolutions() -> Trained:
    """ResNet-50 by its blocks, so with 53 BatchNorms, an eighth as wide, on 32 x 32 images."""
    x, y = torch.randn(8, 3, 32, 32), torch.randint(CLASSES, (8,))
    return _trained(ResNet50(width=8), lambda one: F.cross_entropy(one(x), y))


class Bottleneck(nn.Module):
    """Three convolutions on a residual branch (He et al. 2016)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        out = 4 * channels
        self.branch = nn.Sequential(
            *_convolution(channels_in, channels, 1), nn.ReLU(),
            *_convolution(channels, channels, 3, stride), nn.ReLU(),
            *_convolution(channels, out, 1),
        )  # fmt: skip
        straight = stride == 1 and channels_in == out
        self.shortcut = nn.Sequential(*([] if straight else _convolution(channels_in, out, 1, stride)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.branch(x) + self.shortcut(x))


class ResNet50(nn.Module):
    """With the small first layer that is used for small images."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [*_convolution(3, width, 3), nn.ReLU()]
        channels_in = width
        for number, blocks in enumerate((3, 4, 6, 3)):
            channels = width * 2**number
            for block in range(blocks):
                layers.append(Bottleneck(channels_in, channels, 2 if number and not block else 1))
                channels_in = 4 * channels
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(channels_in, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(F.adaptive_avg_pool2d(self.layers(images), 1).flatten(1))


def _convolution(channels_in: int, channels: int, size: int, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(channels_in, channels, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(channels),
    ]


def _trained(model: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor]) -> Trained:
    in_ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of(in_ddp).backward()
        optimizer.step()

    return Trained(model, optimizer, step)


def _of_workload(module: str, **options: Any) -> Trained:
    """What a script of bench/workloads/ trains: `make bench-overheads` measures others' ways with these."""
    if (folder := str(Path(__file__).resolve().parents[1] / "workloads")) not in sys.path:
        sys.path.append(folder)
    trainee = import_module(module).Trainee(torch.device("cpu"), **options)

    def step() -> None:
        trainee.gradients()
        trainee.update()

    return Trained(trainee.model, trainee.optimizer, step)


MODELS: dict[str, Callable[[], Trained]] = {
    "mlp": mlp,
    "gpt": gpt,
    "convolutions": convolutions,
    "adam_gpt": partial(_of_workload, "adam_gpt"),
    "adam_gpt_tiny": partial(_of_workload, "adam_gpt", tiny=True),
    "resnet18": partial(_of_workload, "resnet18_cifar"),
}
