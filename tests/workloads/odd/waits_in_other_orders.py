"""Collectives that are begun early and waited for late: who waits for one must not wait for the others.

Each form alone is natively free of deadlocks: pairs use different groups, and messages are matched in order.
"""

import torch
import torch.distributed as dist
from odd_program import begin, device, rank, say

begin()
one, other = dist.new_group(), dist.new_group()
weight = torch.nn.Parameter(torch.ones(4, device=device) * (rank + 1))
optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)


def train(step: int) -> None:
    optimizer.zero_grad()
    (weight * weight).sum().mul(0.1 * step).backward()
    optimizer.step()


def number(value: float) -> torch.Tensor:
    return torch.full((3,), value, device=device)


def a_read_of_one_result_while_another_is_awaited(step: int) -> list[torch.Tensor]:
    t, u, v = number(step), number(rank), number(rank + 7)
    if rank == 0:
        work = dist.all_reduce(t, group=one, async_op=True)
        dist.all_reduce(u, group=other)
        u.sum().item()
        dist.broadcast(v, 0, group=other)
        work.wait()
    else:
        dist.all_reduce(u, group=other)
        dist.broadcast(v, 0, group=other)
        v.sum().item()
        dist.all_reduce(t, group=one)
    return [t, u, v]


def an_optimizer_step_between(step: int) -> list[torch.Tensor]:
    t, u = number(step), number(rank + 2)
    if rank == 0:
        work = dist.all_reduce(t, group=one, async_op=True)
        train(step)
        dist.broadcast(u, 0, group=other)
        work.wait()
    else:
        train(step)
        dist.broadcast(u, 0, group=other)
        u.sum().item()
        dist.all_reduce(t, group=one)
    return [t, u]


def synchronization_of_the_stream_between(step: int) -> list[torch.Tensor]:
    t, u = number(step), number(rank + 3)
    if rank == 0:
        work = dist.all_reduce(t, group=one, async_op=True)
        if device.type == "cuda":
            torch.cuda.current_stream().synchronize()
            event = torch.cuda.Event()
            event.record()
            event.synchronize()
        dist.barrier(group=other)
        dist.broadcast(u, 0, group=other)
        work.wait()
    else:
        dist.barrier(group=other)
        dist.broadcast(u, 0, group=other)
        u.sum().item()
        dist.all_reduce(t, group=one)
    return [t, u]


def a_receive_that_is_posted_early(step: int) -> list[torch.Tensor]:
    """Across an optimizer step, and while another message goes the other way."""
    a, b = number(-1), number(step * 2)
    if rank == 0:
        work = dist.irecv(a, 1, group=one)
        train(step)
        dist.send(b, 1, group=other)
        work.wait()
    else:
        train(step)
        dist.recv(a, 0, group=other)
        a.sum().item()
        dist.send(b, 0, group=one)
    return [a, b]


FORMS = [a_read_of_one_result_while_another_is_awaited, an_optimizer_step_between,
         synchronization_of_the_stream_between, a_receive_that_is_posted_early]  # fmt: skip
for step in range(1, 13):
    for form in FORMS:
        say(step, form.__name__, *form(step))
    train(step)
    say(step, weight)
