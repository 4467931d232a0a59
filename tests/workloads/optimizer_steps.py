"""Trains a small model with Adam and writes, as bits, what only this rank knows: its loss behind each step.

    torchrun --nproc-per-node 2 optimizer_steps.py --steps 40 --out FILE [--looks-inside]

At the end the parameters, the optimizer's state and the generators follow.  `--looks-inside`: each step ends
with a look at a parameter that it has just changed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class LooksInside(torch.optim.Adam):
    """Asks for a value before its step is over."""

    seen = 0.0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.seen = self.param_groups[0]["params"][0].detach().sum().item()


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--looks-inside", action="store_true")
    arguments = parser.parse_args()
    rank = int(os.environ["RANK"])
    index = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    torch.manual_seed(7)
    layers = nn.Sequential(nn.Linear(16, 24), nn.Dropout(0.1), nn.Tanh(), nn.Linear(24, 4)).to(device)
    model = DistributedDataParallel(layers, device_ids=[index])
    kind = LooksInside if arguments.looks_inside else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=1e-2)
    torch.manual_seed(8 + rank)
    data = torch.randn(arguments.steps, 8, 16, generator=torch.Generator().manual_seed(rank)).to(device)
    lines = []
    for batch in data:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        lines.append(loss.item().hex())
    lines += [digest(value) for value in layers.state_dict().values()]
    lines += [digest(state[name]) for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    lines += [digest(torch.cuda.get_rng_state(device)), digest(torch.get_rng_state())]
    arguments.out.with_suffix(f".{rank}").write_text("\n".join(lines))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
