"""Trains until a file called like torchrun's attempt appears in a folder, then fails; `end` ends it."""

import os
import sys
from pathlib import Path

import torch

folder = Path(sys.argv[1])
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
while not (folder / "end").exists():
    model(torch.ones(4, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if (folder / attempt).exists():
        raise RuntimeError(f"attempt {attempt} fails")
