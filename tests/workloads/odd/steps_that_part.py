"""Two replicas whose optimizer steps differ now and then: rank 1 alone writes down a statistic inside."""

import torch
import torch.distributed as dist
from odd_program import begin, device, rank, say

FIRST, APART, TIMES = 60, 40, 6


class Own(torch.optim.Optimizer):
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-0.01)
            scratch.copy_(model.weight.data[0, :32])
        if rank == 1 and step >= FIRST and step % APART == FIRST % APART:
            statistic.copy_(model.weight.data[1, 32:])


begin()
torch.manual_seed(0)
model = torch.nn.Linear(64, 32).to(device)
scratch, statistic = torch.zeros(32).to(device), torch.zeros(32).to(device)
optimizer = Own(model.parameters(), {})
for step in range(1, FIRST + APART * TIMES):
    x = torch.randn(16, 64).to(device)
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    say(step, loss, statistic, *model.parameters())
