"""A worker that fails once: torchrun starts all of them again, and training resumes from its checkpoint.

Each loss goes to `--out`.rank as a line of bits; the backend is PyTorch's choice.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cuda")
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=9)
parser.add_argument("--fail-at", type=int, default=4)
args = parser.parse_args()

rank = int(os.environ["RANK"])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
device = (
    torch.device(args.device, int(os.environ["LOCAL_RANK"])) if args.device == "cuda" else torch.device("cpu")
)
if args.device == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group()
torch.manual_seed(7)
network = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).to(device)
model = DistributedDataParallel(network)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
checkpoint = args.out.with_suffix(".checkpoint")
first = 1
if checkpoint.exists():
    saved = torch.load(checkpoint, map_location=device)
    network.load_state_dict(saved["network"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"] + 1

for step in range(first, args.steps + 1):
    if step == args.fail_at and attempt == 0 and rank == 1:
        raise RuntimeError("this worker fails once")
    generator = torch.Generator().manual_seed(100 * step + rank)
    loss = model(torch.randn(5, 8, generator=generator).to(device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with args.out.with_suffix(f".{rank}").open("a") as out:
        out.write(f"{step} {attempt} {loss.item().hex()}\n")
    if rank == 0:
        state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, checkpoint.with_suffix(".new"))
        checkpoint.with_suffix(".new").rename(checkpoint)
    dist.barrier()
dist.barrier()  # no rank leaves while another still talks to it
dist.destroy_process_group()
