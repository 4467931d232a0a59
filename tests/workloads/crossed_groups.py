"""Three ranks: in each step 0 and 1 exchange messages in the group of all, then 0 and 2 reduce in their own.

After its first call the group of all is used by 2 at the end alone. With `--messages` that call is a batch of
messages as well, so that the group has had no collective before.
"""

import sys

import torch
import torch.distributed as dist

steps = int(sys.argv[1])
dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
ends = dist.new_group([0, 2])
weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
optimizer = torch.optim.SGD([weight], lr=0.5)  # its steps are commits
one = torch.ones(1, device="cuda")
if "--messages" in sys.argv:  # as a group's first call is to be one of all its ranks
    ring = [dist.P2POp(dist.isend, one, (rank + 1) % 3), dist.P2POp(dist.irecv, one.clone(), (rank + 2) % 3)]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
else:
    dist.all_reduce(one)
total = torch.zeros(4, device="cuda")
for step in range(steps):
    mine = torch.full((4,), float(10 * rank + step), device="cuda")
    if rank != 2:
        theirs = torch.empty(4, device="cuda")
        batch = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, theirs, 1 - rank)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        mine = mine + theirs
    if rank != 1:
        dist.all_reduce(mine, group=ends)
    total += mine
    (weight * mine).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
exchanged = sum(10 + 2 * step for step in range(steps))
wanted = exchanged if rank == 1 else exchanged + sum(20 + step for step in range(steps))
dist.barrier()
right = total.tolist() == [wanted] * 4
print("right" if right else f"rank {rank}: {total.tolist()}, not {wanted}", flush=True)
dist.destroy_process_group()
