"""The loop that the training workloads share: steps in blocks, one look at the losses per block."""

import argparse
import json
import struct
import time
from collections.abc import Callable
from pathlib import Path

import torch

Step = Callable[[int], torch.Tensor]  # runs step number n, gives its loss


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> torch.Tensor:
    """One step down the gradient of `loss`, which comes back."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss


def run(name: str, make_step: Callable[[torch.device], Step], block: int = 10) -> None:
    """Run `make_step(device)` as the command line says.

    A script that reads its loss every few steps, as most do, lets the device run behind in between; the time
    of a step is that of its block, from the first call to the losses on the host, divided by the steps in it.
    """
    parser = argparse.ArgumentParser(description=name)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--log-every", type=int, default=block, help="steps per block")
    parser.add_argument("--losses", type=Path, help="write each step's loss, as hexadecimal bits")
    parser.add_argument("--timings", type=Path, help="write each step's seconds, as JSON")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    step = make_step(torch.device(arguments.device))
    losses: list[float] = []
    seconds: list[float] = []
    for first in range(0, arguments.steps, arguments.log_every):
        numbers = range(first, min(first + arguments.log_every, arguments.steps))
        begin = time.perf_counter()
        block_losses = torch.stack([step(number).detach() for number in numbers]).tolist()
        seconds += [(time.perf_counter() - begin) / len(numbers)] * len(numbers)
        losses += block_losses
        print(f"step {numbers[-1] + 1:5d}  loss {losses[-1]:.4f}", flush=True)
    if arguments.losses:
        arguments.losses.write_text("".join(f"{struct.pack('>f', loss).hex()}\n" for loss in losses))
    if arguments.timings:
        arguments.timings.write_text(json.dumps(seconds))
