"""A script that starts its two ranks itself, with torch.multiprocessing; each writes its losses and weights.

With `--device-first` a rank uses its device before it says which rank it is.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist


def train(rank: int, args: argparse.Namespace, meeting_point: str) -> None:
    device = torch.device("cpu")
    if args.device == "cuda":
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
    if args.device_first:
        assert torch.ones(3, device=device).sum().item() == 3
    dist.init_process_group(
        {"cpu": "gloo", "cuda": "nccl"}[args.device],
        init_method=f"file://{meeting_point}", rank=rank, world_size=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).to(device)
    ddp = torch.nn.parallel.DistributedDataParallel(
        model, device_ids=[rank] if device.type == "cuda" else None
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1 + rank)
    lines = []
    for _ in range(6):
        inputs = torch.randn(4, 8).to(device)
        loss = (ddp(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lines.append(loss.item().hex())
    lines += [value.hex() for p in model.parameters() for value in p.flatten().tolist()]
    args.out.with_name(f"{args.out.name}.{rank}").write_text("\n".join(lines))
    dist.barrier(device_ids=[rank] if device.type == "cuda" else None)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--device-first", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, (arguments, f"{folder}/meeting"), nprocs=2)
    print("both ranks done", flush=True)
