"""Ranks in a ring: each sends to the next one and receives from the one before in one batch, the send first.

A tensor goes round and gains 1 at each rank; another one goes the other way with it. Prints "right" if both
are what they must be. With `--one-by-one` they are no batch: on a GPU that stands still for good.
"""

import sys

import torch
import torch.distributed as dist

steps, one_by_one = int(sys.argv[1]), "--one-by-one" in sys.argv
ELEMENTS = 1000
dist.init_process_group("nccl")
rank, size = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank)
after, before = (rank + 1) % size, (rank - 1) % size
weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
optimizer = torch.optim.SGD([weight], lr=0.5)  # its steps are commits
dist.all_reduce(torch.ones(1, device="cuda"))  # as a group's first call is to be one of all its ranks


def exchange(*pairs: tuple[torch.Tensor, int, torch.Tensor, int]) -> None:
    """Each sends its first tensor to a rank, and receives the second one from a rank."""
    batch = [dist.P2POp(dist.isend, out, to) for out, to, _, _ in pairs]
    batch += [dist.P2POp(dist.irecv, into, origin) for _, _, into, origin in pairs]
    works = [one.op(one.tensor, one.peer) for one in batch] if one_by_one else dist.batch_isend_irecv(batch)
    for work in works:
        work.wait()


def of(origin: int) -> torch.Tensor:
    return torch.arange(ELEMENTS, device="cuda") + 10_000.0 * origin


forwards, backwards = of(rank), of(rank)
for _ in range(steps):
    came, went = torch.empty(ELEMENTS, device="cuda"), torch.empty(ELEMENTS, device="cuda")
    exchange((forwards, after, came, before), (backwards, before, went, after))
    forwards, backwards = came + 1, went - 1
    (weight * forwards[:4]).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
right = torch.equal(forwards, of((rank - steps) % size) + steps)
right &= torch.equal(backwards, of((rank + steps) % size) - steps)
dist.barrier()
print("right" if right else f"rank {rank}: {forwards[:4].tolist()} {backwards[:4].tolist()}", flush=True)
dist.destroy_process_group()
