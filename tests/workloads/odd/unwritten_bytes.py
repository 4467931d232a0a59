"""Reads what nobody wrote: padding of object collectives, tables that are filled in part.

Only what was written is said: natively the rest is anything.
"""

import torch
import torch.distributed as dist
from odd_program import begin, device, rank, say, world

begin()
weight = torch.nn.Parameter(torch.ones(4, 4, device=device))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(1, 13):
    garbage = [torch.full((n,), float(step), device=device) for n in (40, 64, 128, 700)]
    del garbage
    gathered: list[object] = [None] * world
    dist.all_gather_object(gathered, {"text": "x" * (100 * (rank + 1) * step)})
    table = torch.empty(64, device=device)
    table[:step] = step
    grown = torch.full((3,), 2.0, device=device).resize_(40)
    spread = torch.empty_like(table).as_strided((4, 4), (16, 1))
    spread.fill_(step)
    whole = [
        table.cpu(),
        grown.cpu(),
        torch.empty_strided((3, 3), (7, 2), device=device).untyped_storage().cpu(),
    ]
    loss = (weight * spread).sum() * (rank + 1)
    optimizer.zero_grad()
    loss.backward()
    dist.all_reduce(weight.grad)
    optimizer.step()
    say(step, gathered, whole[0][:step], whole[1][:3], len(whole[2]), loss, weight)
