"""A training step whose kernels are so small that launching them is all that takes time."""

import step_loop
import torch
import torch.nn.functional as F
from torch import nn

FEATURES, WIDTH, CLASSES, BATCH, BATCHES = 16, 32, 4, 16, 8


def make_step(device: torch.device) -> step_loop.Step:
    model = nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, CLASSES),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    inputs = torch.randn(BATCHES, BATCH, FEATURES).to(device)
    labels = torch.randint(CLASSES, (BATCHES, BATCH)).to(device)

    def step(number: int) -> torch.Tensor:
        loss = F.cross_entropy(model(inputs[number % BATCHES]), labels[number % BATCHES])
        return step_loop.update(optimizer, loss)

    return step


if __name__ == "__main__":
    step_loop.run("launch-bound MLP", make_step, block=20)
