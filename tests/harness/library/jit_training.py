"""A training of a few numbers, for tests of just-in-time saves."""

from __future__ import annotations

import torch
from torch import nn


class Training:
    """A small model whose forward pass draws numbers and changes statistics."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def loss(self) -> torch.Tensor:
        result: torch.Tensor = self.model(torch.ones(5, 3) * torch.rand(5, 1)).square().mean()
        return result

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def buffers(self) -> dict[str, torch.Tensor]:
        return {name: buffer.clone() for name, buffer in self.model.named_buffers()}
