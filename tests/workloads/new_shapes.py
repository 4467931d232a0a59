"""Trains a model whose every batch has a shape of its own, as sentences have lengths of their own.

    torchrun --nproc-per-node 2 new_shapes.py --steps 40 --out FILE

Writes losses, what a second thread computed meanwhile, and a digest of each weight; on our device also says
at marks what the client holds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MARKS = 8


def count_on(device: torch.device, rank: int, rounds: int, found: list[str]) -> None:
    """Beside the training: shapes that come back, and shapes that do not.

    Never the same numbers on both ranks: what is alike now and then looks like a replica that was corrupted.
    """
    total = torch.full((), rank + 0.5, device=device)
    for n in range(rounds):
        total += torch.full((n % 7 + 1,), float(n), device=device).sum()
        total += torch.ones(3, n + 2, device=device).sum()
        if n % 10 == 0:
            found.append(total.item().hex())


def held() -> dict[str, int]:
    if "understudy.proxy_client" not in sys.modules:
        return {}
    from understudy.proxy_client import _client

    statistics = _client.statistics()
    return {name: int(statistics[name]) for name in ("templates", "dictionary_bytes")}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device(arguments.device, rank if arguments.device == "cuda" else None)
    if arguments.device == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(7)
    model: nn.Module = nn.Sequential(
        nn.Conv1d(3, 8, 3, padding=1), nn.GELU(), nn.BatchNorm1d(8), nn.Conv1d(8, 4, 1), nn.Tanh()
    ).to(device)
    layers = model
    if world > 1:
        dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo")
        model = DistributedDataParallel(layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    lines: list[str] = []
    counted: list[str] = []
    beside = threading.Thread(target=count_on, args=(device, rank, 4 * arguments.steps, counted))
    beside.start()
    for step in range(1, arguments.steps + 1):
        batch = torch.randn(2 + rank, 3, 3 + step, generator=generator).to(device)
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        lines.append(loss.item().hex())
        if rank == 0 and step % (arguments.steps // MARKS) == 0:
            print(f"MARK {json.dumps({'step': step, **held()})}\n", end="", flush=True)  # in one piece
    beside.join()
    state = layers.state_dict().values()
    lines += [hashlib.sha256(value.cpu().contiguous().numpy().tobytes()).hexdigest() for value in state]
    arguments.out.with_suffix(f".{rank}").write_text("\n".join([*lines, *counted]))
    if world > 1:
        dist.barrier()
        del model  # PyTorch 2.13 may hang where it is what frees the process group at last
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
