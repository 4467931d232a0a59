"""A message comes later than the time that communicators have to connect in."""

import time

import torch
import torch.distributed as dist
from odd_program import begin, device, rank, say

LATE_S = 17
begin()
message = torch.arange(4.0).to(device)
if rank == 0:
    time.sleep(LATE_S)
    dist.send(message * 2, 1)
else:
    dist.recv(message, 0)
say(message)
dist.all_reduce(message)
say(message)
