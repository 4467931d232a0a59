"""Steps with parameters and optimizer state sharded over the ranks; writes values that only it holds."""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--out", required=True)
parser.add_argument("--limit", type=Path, help="a file with how many steps may be done, for now")
args = parser.parse_args()
rank = int(os.environ["RANK"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)) for _ in range(2))
).cuda()
for block in model:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(100 + rank)
with open(f"{args.out}.{rank}", "w") as out:
    for step in range(args.steps):
        while args.limit is not None and step >= int(args.limit.read_text()):
            time.sleep(0.05)
        batch = torch.randn(8, 64).cuda()
        noise = torch.rand(8, 64, device="cuda")
        loss = (model(batch) - noise).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(step + 1, loss.item().hex(), norm.full_tensor().item().hex(), file=out, flush=True)
dist.destroy_process_group()
