"""What can be set is first set in the fifth minibatch, which is executed twice, and set back by and by."""

import torch
import torch.distributed as dist
from odd_program import begin, device, say


def change(step: int) -> None:
    if step == 5:
        torch.set_num_threads(2)
        torch.set_flush_denormal(True)
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("medium")
        torch.backends.mkldnn.enabled = False
    elif step == 8:
        torch.set_default_dtype(torch.bfloat16)
        torch.use_deterministic_algorithms(True)
    elif step == 9:
        torch.set_num_threads(1)
        torch.backends.mkldnn.enabled = True
    elif step == 10:
        torch.use_deterministic_algorithms(False)
        torch.set_flush_denormal(False)
    elif step == 11:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")


begin()
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 8)
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
many = torch.randn(300_000, dtype=torch.float32).to(device)  # summed in parts, one for each thread
counts = torch.arange(1, 6, device=device)
tiny = torch.full((4,), 1e-30, dtype=torch.float32, device=device)
for step in range(1, 15):
    x = torch.randn(4, 3, 8, 8, dtype=torch.float32).to(device)
    y = model(x)
    change(step)
    loss = y.square().mean() + (many * step).sum() * 1e-6 + model(x * 0.5).square().mean()
    shares, product = counts / 3, (tiny * 1e-10).view(torch.int32)
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    unwritten = torch.empty(2, device=device) if torch.are_deterministic_algorithms_enabled() else "-"
    say(step, loss, shares, product, torch.tanh(counts), unwritten, *model.parameters())
