"""A small training whose whole state is packed into checkpoints."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from understudy.data import ResumableSampler, StatePack, blocking, overlapped

STRATEGIES = pytest.mark.parametrize("strategy", [blocking, overlapped(2)], ids=["blocking", "overlapped"])


class Training:
    """A small one, with something of everything that has a state."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5], gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        self.sampler = ResumableSampler(40, 4, rank=0, world_size=1, seed=3)
        self.generator = torch.Generator().manual_seed(seed)

    def pack(self, directory: Path, **options: Any) -> StatePack:
        return StatePack(directory, **{**vars(self), **options})

    def step(self) -> str:
        """The loss of one step, as bits; every generator of random numbers has a part in it."""
        inputs = torch.randn(4, 4, generator=self.generator) * random.random() + float(np.random.rand())
        inputs[:, 0] += torch.tensor(self.sampler.indices(self.sampler.epoch, self.sampler.cursor_step))
        loss = self.model(inputs).square().mean()
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.sampler.advance()
        return loss.item().hex()


def saved(directory: Path, steps: int = 3, **options: Any) -> Training:
    """A training with a checkpoint behind each step."""
    training = Training()
    with training.pack(directory, **options) as pack:
        for step in range(1, steps + 1):
            training.step()
            pack.save(step)
    return training


def lines(directory: Path) -> list[dict[str, Any]]:
    text = (directory / "checkpoints-rank00000.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]
