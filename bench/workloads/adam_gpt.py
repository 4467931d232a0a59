"""Trains a GPT with AdamW on random tokens: a state of 115 MB, and about 0.2 s a step on one core.

    python bench/workloads/adam_gpt.py --steps 30 --timings times.json

Knows nothing of snapshots; bench/snapshots/baseline_training.py trains the same, with others' ways to take
them.
"""

import argparse
import json
import os
import struct
import time
from pathlib import Path

import torch
import torch.distributed as dist
from large_models import Gpt2
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

SHAPE = (512, 64, 12, 4, 256)
"""Vocabulary, positions, layers, heads, width: 9,625,088 parameters, 12 bytes each with Adam's moments."""
TINY = (64, 16, 2, 2, 32)
BATCH = 4


class Trainee:
    """The model and its optimizer, on one batch for ever."""

    def __init__(self, device: torch.device, tiny: bool = False) -> None:
        torch.manual_seed(1)
        shape = TINY if tiny else SHAPE
        self.model: nn.Module = Gpt2(*shape).to(device)
        if dist.is_initialized():
            self.model = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self._ids = torch.randint(shape[0], (BATCH, shape[1] + 1)).to(device)

    def gradients(self) -> Tensor:
        """Forward and backward; the loss."""
        scores = self.model(self._ids[:, :-1]).flatten(0, 1)
        loss = functional.cross_entropy(scores, self._ids[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        """A step of AdamW; gradients go at once, as their memory is not needed any more."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def of_rank(path: Path, rank: int) -> Path:
    return path if rank == 0 else path.with_name(f"{path.name}.rank{rank}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tiny", action="store_true", help="a model of the same kind for a quick look")
    parser.add_argument("--load", type=Path, help="a folder with model.pt and optimizer.pt to go on from")
    parser.add_argument("--losses", type=Path, help="where the bits of every loss go")
    parser.add_argument("--timings", type=Path, help="where the seconds of every step go, as JSON")
    asked = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if asked.device == "cuda" else "gloo")
    device = torch.device(asked.device, rank) if asked.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    trainee = Trainee(device, asked.tiny)
    print("made", flush=True)
    if asked.load:
        trainee.model.load_state_dict(torch.load(asked.load / "model.pt"))
        trainee.optimizer.load_state_dict(torch.load(asked.load / "optimizer.pt"))
        if device.type == "cuda":
            torch.cuda.synchronize()
        print("loaded", flush=True)
    losses, seconds = [], []
    for number in range(1, asked.steps + 1):
        begin = time.perf_counter()
        loss = trainee.gradients()
        trainee.update()
        losses.append(loss.item())  # waits for the device
        seconds.append(time.perf_counter() - begin)
        print(f"step {number} loss {losses[-1]:.4f}", flush=True)
    if asked.losses:
        of_rank(asked.losses, rank).write_text("".join(f"{struct.pack('>f', x).hex()}\n" for x in losses))
    if asked.timings:
        of_rank(asked.timings, rank).write_text(json.dumps(seconds))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
