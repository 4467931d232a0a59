"""The plainest regression. Its loss lies in as many bytes as its input has, of which four are written."""

import torch
from odd_program import begin, device, on_device, say
from torch.nn.parallel import DistributedDataParallel

begin()
model = DistributedDataParallel(
    torch.nn.Linear(8, 8).to(device), device_ids=[device.index] if on_device else None
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(1, 13):
    x = torch.randn(16, 8).to(device)
    losses = [
        loss(model(x), x) for loss in (torch.nn.MSELoss(), torch.nn.SmoothL1Loss(), torch.nn.HuberLoss())
    ]
    optimizer.zero_grad()
    sum(losses).backward()  # type: ignore[union-attr]
    optimizer.step()
    say(step, *losses)
