"""Pairs of ranks work by themselves for a while; all of them meet for the first time late in the program.

A recovery concerns only ranks that share a communicator, so by then those of one pair may have recovered more
often than the others.
"""

import torch
import torch.distributed as dist
from odd_program import begin, device, rank, say, world

begin()
pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
pair = pairs[rank // 2]
weight = torch.nn.Parameter(torch.ones(4, device=device) * (rank + 1))
optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
for step in range(1, 13):
    optimizer.zero_grad()
    (weight * weight).sum().mul(0.1 * step).backward()
    if world > 2:
        dist.all_reduce(weight.grad, group=pair)
    optimizer.step()
    if step in (7, 12):
        mean = weight.detach() / world
        dist.all_reduce(mean)
        say(step, mean)
    say(step, weight)
