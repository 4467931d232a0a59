"""Every collective of the issue, on `--device`; writes the bytes of all results to `--out`.rank."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cuda")
parser.add_argument("--out", type=Path)
parser.add_argument("--steps", type=int, default=1)
args = parser.parse_args()

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if args.device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
device = torch.device(args.device)
dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
results: list[torch.Tensor] = []
weight = torch.nn.Parameter(torch.ones(8, device=device))
optimizer = torch.optim.SGD([weight], lr=0.1)  # its steps are commits


def fresh(*shape: int, scale: float = 1.0) -> torch.Tensor:
    numbers = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32)
    return (numbers.reshape(shape) * scale * (rank + 1)).to(device)


def keep(*tensors: torch.Tensor) -> None:
    results.extend(t.detach().cpu().clone() for t in tensors)


for step in range(args.steps):
    scale = 1.0 + step / 7
    x = fresh(4, 3, scale=scale)
    dist.broadcast(x, src=1)
    keep(x)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        y = fresh(5, scale=scale)
        dist.all_reduce(y, op=op)
        keep(y)
    y = fresh(5, scale=scale)
    dist.reduce(y, dst=0)
    if rank == 0:
        keep(y)
    gathered = [torch.empty(3, device=device) for _ in range(size)]
    dist.all_gather(gathered, fresh(3, scale=scale))
    keep(*gathered)
    whole = torch.empty(3 * size, device=device)
    dist.all_gather_into_tensor(whole, fresh(3, scale=scale))
    keep(whole)
    part = torch.empty(3, device=device)
    dist.reduce_scatter(part, [fresh(3, scale=scale + i) for i in range(size)])
    keep(part)
    part = torch.empty(3, device=device)
    dist.reduce_scatter_tensor(part, fresh(3 * size, scale=scale))
    keep(part)
    out = torch.empty(2 * size, device=device)
    dist.all_to_all_single(out, fresh(2 * size, scale=scale))
    keep(out)
    if args.device == "cuda":  # Gloo itself has no all_to_all of lists
        outs = [torch.empty(2, device=device) for _ in range(size)]
        dist.all_to_all(outs, list(fresh(2 * size, scale=scale).chunk(size)))
        if not torch.equal(torch.cat(outs), out):
            raise SystemExit("all_to_all differs from all_to_all_single")
    dist.barrier()
    work = dist.all_reduce(late := fresh(1000, scale=scale), async_op=True)
    busy = fresh(64, 64).matmul(fresh(64, 64))  # goes on beside the collective
    work.wait()
    keep(late, busy)
    if rank == 0:
        dist.send(fresh(6, scale=scale), dst=1)
        dist.recv(back := torch.empty(6, device=device), src=1)
    else:
        dist.recv(back := torch.empty(6, device=device), src=0)
        dist.send(fresh(6, scale=scale), dst=0)
    keep(back)
    exchange = torch.empty(4, device=device)
    requests = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, fresh(4, scale=scale), 1 - rank),
            dist.P2POp(dist.irecv, exchange, 1 - rank),
        ]
    )
    for request in requests:
        request.wait()
    keep(exchange)
    objects: list = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "step": step})
    if objects != [{"rank": r, "step": step} for r in range(size)]:
        raise SystemExit(f"all_gather_object gave {objects}")
    box = [{"from": 0, "step": step}] if rank == 0 else [None]
    dist.broadcast_object_list(box, src=0)
    if box != [{"from": 0, "step": step}]:
        raise SystemExit(f"broadcast_object_list gave {box}")
    group = dist.new_group([0, 1])
    dist.all_reduce(z := fresh(2, scale=scale), group=group)
    keep(z)
    dist.destroy_process_group(group)
    loss = (weight * z.sum()).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    keep(weight)

content = b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in results)
args.out.with_suffix(f".{rank}").write_bytes(content)
dist.barrier()  # no rank leaves while another still talks to it
dist.destroy_process_group()
