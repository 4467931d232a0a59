"""What is trained: data sets that know their samples' ids, models, and their optimizers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from understudy.campaigns.programs.plan import Plan

BLOCK = 64
CHARACTERS = 200_000
GPT = {"layers": 2, "heads": 4, "width": 128, "dropout": 0.1}
CONVNET = {"width": 32, "dropout": 0.1}
HIDDEN = 1024


@dataclass(frozen=True)
class Training:
    """`losses(model, x, y)`: the mean over a batch."""

    dataset: TensorDataset
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any

    def loss(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """`model`: this one, or DistributedDataParallel around it. A GPT reckons its own."""
        if y.dim() > 1:
            found: torch.Tensor = model(x, y)
            return found
        return functional.cross_entropy(model(x), y)


def make(plan: Plan, device: torch.device) -> Training:
    """All ranks alike: generators are seeded with the plan's seed."""
    torch.manual_seed(plan.seed)
    dataset, classes = _text(plan) if plan.model == "gpt" else _images(plan)
    model: nn.Module
    if plan.model == "gpt":
        from understudy.examples.char_gpt import CharGPT, parameter_groups

        model = CharGPT(classes, BLOCK, **GPT).to(device)  # type: ignore[arg-type]
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            parameter_groups(model, decay=0.1), lr=1e-3, betas=(0.9, 0.95)
        )
    elif plan.model == "convnet":
        from understudy.examples.digits_convnet import ConvNet

        model = ConvNet(**CONVNET).to(device)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    else:
        pixels = dataset.tensors[0][0].numel()
        layers = (nn.Linear(pixels, HIDDEN), nn.ReLU(), nn.Dropout(0.1), nn.Linear(HIDDEN, HIDDEN))
        model = nn.Sequential(nn.Flatten(), *layers, nn.ReLU(), nn.Linear(HIDDEN, classes)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, plan.steps)
    return Training(dataset, model, optimizer, scheduler)


def _text(plan: Plan) -> tuple[TensorDataset, int]:
    """Windows side by side, and the same moved on by a character; how many characters there are."""
    from understudy.examples.char_gpt import read_text

    text = read_text(Path(plan.text) if plan.data == "text" else None, CHARACTERS)
    index = {character: number for number, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([index[character] for character in text])
    count = (len(tokens) - 1) // BLOCK
    x = tokens[: count * BLOCK].view(count, BLOCK)
    y = tokens[1 : count * BLOCK + 1].view(count, BLOCK)
    return TensorDataset(x, y, torch.arange(count)), len(index)


def _images(plan: Plan) -> tuple[TensorDataset, int]:
    if plan.data == "mnist":
        from understudy.examples.resumable_mnist import read

        images, labels = read(Path(plan.mnist))
        images = images.float().view(len(images), 1, 28, 28)
    else:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.tensor(digits.target)
    return TensorDataset(images, labels.long(), torch.arange(len(labels))), 10
