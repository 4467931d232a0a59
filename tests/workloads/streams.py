"""Trains with streams of its own: batches come on one, a part of the model runs on another, and a third one
reduces gradients of all ranks. Prints the losses, in order and whole."""

import os
import sys

import torch
import torch.distributed as dist

STEPS, WIDTH = 8, 64

rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
device = torch.device("cuda", torch.cuda.current_device())
if ranks > 1:
    dist.init_process_group("nccl")
torch.manual_seed(7)
first = torch.nn.Linear(WIDTH, WIDTH, device=device)
left, right = (torch.nn.Linear(WIDTH, WIDTH, device=device) for _ in range(2))
parameters = [*first.parameters(), *left.parameters(), *right.parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
copies, side, reduction = (torch.cuda.Stream(priority=-1), torch.cuda.Stream(), torch.cuda.Stream())
assert copies.priority == -1 and side.priority == 0
main = torch.cuda.current_stream()
batches = torch.Generator().manual_seed(100 + rank)


def fetch() -> tuple[torch.Tensor, torch.cuda.Event]:
    with torch.cuda.stream(copies):
        batch = torch.randn(32, WIDTH, generator=batches).pin_memory().to(device, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
    return batch, arrived


coming = fetch()
for step in range(STEPS):
    batch, arrived = coming
    main.wait_event(arrived)
    batch.record_stream(main)
    coming = fetch()
    hidden = torch.tanh(first(batch))
    del batch
    side.wait_stream(main)
    with torch.cuda.stream(side):
        hidden.record_stream(side)
        other = torch.tanh(right(hidden)).square().mean()
    loss = (left(hidden) - hidden).square().mean()
    main.wait_stream(side)
    other.record_stream(main)
    loss = loss + other
    loss.backward()
    if ranks > 1:
        reduction.wait_stream(main)
        with torch.cuda.stream(reduction):
            works = []
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad.record_stream(reduction)
                works.append(dist.all_reduce(parameter.grad, async_op=True))
            for work in works:
                work.wait()
            for parameter in parameters:
                parameter.grad.div_(ranks)
        main.wait_stream(reduction)
    optimizer.step()
    optimizer.zero_grad()
    done = torch.cuda.Event()
    done.record()
    if step % 3 == 2:
        done.synchronize()
        assert done.query()
        side.synchronize()
        assert side.query()
    sys.stdout.write(f"rank {rank} step {step} {loss.item().hex()}\n")
    sys.stdout.flush()
if ranks > 1:
    dist.destroy_process_group()
