"""Two ranks that gather a tensor of each into buffers that live for a step, and train beside it.

What rank 1 has gathered is equal to what rank 0 holds, and is let go of without being read: it looks like a
replica, and is none.  `python gathered_state.py STEPS`: prints what was gathered and the loss, step by step.
"""

import os
import sys

import torch
import torch.distributed as dist

rank, on_device = int(os.environ["RANK"]), torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_device else torch.device("cpu")
dist.init_process_group("nccl" if on_device else "gloo")
torch.manual_seed(rank)
if on_device:
    torch.cuda.set_device(device)
with torch.device(device):
    model = torch.nn.Linear(5, 4)
for parameter in model.parameters():
    dist.broadcast(parameter.data, 0)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
own = torch.arange(4.0, device=device) + rank
gathered: list[torch.Tensor] = []
for _ in range(int(sys.argv[1])):
    gathered = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(gathered, own)
    seen = torch.cat(gathered).tolist()
    for _ in range(6):  # at the end of the second one they are no longer new
        loss = model(torch.randn(3, 5, device=device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    sys.stdout.write(f"rank {rank}: {seen} {loss.item().hex()}\n")
    sys.stdout.flush()
dist.barrier()
dist.destroy_process_group()
