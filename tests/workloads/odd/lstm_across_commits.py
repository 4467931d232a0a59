"""An actor's LSTM runs forward before the critic's optimizer steps and backward behind them."""

import torch
import torch.distributed as dist
from odd_program import begin, device, say

begin()
torch.manual_seed(0)
actor, critic = torch.nn.LSTM(8, 16).to(device), torch.nn.Linear(8, 4).to(device)
optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (actor, critic)]


def update(model: torch.nn.Module, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()


for step in range(1, 11):
    x = torch.randn(5, 3, 8).to(device)
    out, _ = actor(x)
    for _ in range(step % 3):
        update(critic, critic(x).square().mean(), optimizers[1])
    loss = out.square().mean()
    update(actor, loss, optimizers[0])
    say(step, loss, *actor.parameters())
