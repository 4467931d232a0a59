"""Three ranks: the first posts the receive of what comes around before it sends anything."""

import torch
import torch.distributed as dist
from odd_program import begin, device, rank, say

begin()
weight = torch.nn.Parameter(torch.ones(4, device=device))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(1, 11):
    came, gone = torch.zeros(4, device=device), torch.full((4,), float(step * (rank + 1)), device=device)
    gradient = weight.detach() * step
    if rank == 0:
        work = dist.irecv(came, 2)
        dist.all_reduce(gradient)
        say(step, gradient.norm().item())
        dist.send(gone, 1)
        work.wait()
    else:
        dist.all_reduce(gradient)
        dist.recv(came, rank - 1)
        dist.send(came + gone, (rank + 1) % 3)
    weight.grad = gradient
    optimizer.step()
    say(step, came, weight)
