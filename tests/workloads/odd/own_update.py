"""Parameters that the script updates itself, as word_language_model does: no optimizer steps.

Of several ranks the first alone looks at its loss meanwhile.
"""

import torch
from odd_program import begin, device, on_device, rank, say, world
from torch.nn.parallel import DistributedDataParallel

STEPS = 400

begin()
model: torch.nn.Module = torch.nn.Sequential(
    torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8)
).to(device)
if world > 1:
    model = DistributedDataParallel(model, device_ids=[device.index] if on_device else None)
for step in range(1, STEPS + 1):
    x = torch.randn(16, 8).to(device)
    model.zero_grad()
    loss = (model(x) - x).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    for parameter in model.parameters():
        parameter.data.add_(parameter.grad, alpha=-0.5)
    if step == STEPS or (step % 20 == 0 and rank == 0):
        say(step, loss, *model.parameters())
