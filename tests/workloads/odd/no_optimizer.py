"""Many steps without an optimizer: an evaluation, say. Each sends a megabyte and some read a value."""

import sys

import torch
import torch.distributed as dist
from odd_program import begin, device, rank, say

begin()
state = torch.zeros(1000).to(device)
for step in range(1, int(sys.argv[2]) + 1):
    batch = torch.full((1 << 18,), float(step + rank)).to(device)
    state.add_(batch[:1000], alpha=1e-3)
    total = batch.sum() + state.sum()
    dist.all_reduce(total)
    if step % 10 == 0:
        say(step, total, state)
