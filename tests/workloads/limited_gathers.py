"""FullyShardedDataParallel, whose rate limiter waits for events on the host; prints the losses, in order and
whole."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch
from torch.distributed.fsdp import FullyShardedDataParallel as Sharded
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


rank = int(os.environ["RANK"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
torch.manual_seed(0)
model = Sharded(
    nn.Sequential(*(Block() for _ in range(4))).cuda(),
    auto_wrap_policy=ModuleWrapPolicy({Block}),
    device_id=torch.cuda.current_device(),
    limit_all_gathers=True,
    forward_prefetch=True,
    backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
    use_orig_params=True,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(100 + rank)
for step in range(8):
    batch = torch.randn(8, 64).pin_memory().cuda(non_blocking=True)
    loss = model(batch).square().mean()
    loss.backward()
    norm = model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    sys.stdout.write(f"rank {rank} step {step} {(loss + norm).item().hex()}\n")
    sys.stdout.flush()
dist.destroy_process_group()
