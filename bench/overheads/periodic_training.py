"""Trains a model natively, and takes checkpoints in the paper's three periodic ways, in turns.

    python periodic_training.py --model M --disk DIR --memory DIR --rounds 8 --steps 6 --seconds 80 --output F

For overheads_cost.py.  A round has a block of steps for each way, in random order, with one checkpoint at its
beginning, and one without before, between and behind them.  A block of a way that writes behind the training
goes on until that has ended, so that nothing it costs is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "snapshots"))
sys.path.insert(2, str(Path(__file__).resolve().parent.parent / "workloads"))

import torch
from baseline_training import Taker, state_of
from paper_policies import CheckFreq
from persist_ways import TorchSave, Way
from training_state import State, bytes_of

LEAST_ROUNDS = 3
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "adam_gpt": ("adam_gpt", {}),
    "adam_gpt_tiny": ("adam_gpt", {"tiny": True}),
    "resnet18": ("resnet18_cifar", {}),
}
"""As in bench/jit/steady_models.py: what a module of bench/workloads/ trains, and how it is made."""


@dataclass(frozen=True)
class Periodic:
    """One of the paper's ways (§6.3)."""

    opened: Callable[[Path, Path], Way]
    """In a folder on the disk, or one in memory."""
    overlaps: bool
    """It returns at once, and the next update waits for its copy."""


WAYS = {
    "PC_disk": Periodic(lambda disk, memory: TorchSave(disk / "torch.save"), overlaps=False),
    "PC_mem": Periodic(lambda disk, memory: TorchSave(memory / "torch.save"), overlaps=False),
    "CheckFreq": Periodic(lambda disk, memory: CheckFreq(disk / "checkfreq"), overlaps=True),
}


@dataclass(frozen=True)
class Block:
    """Some steps; seconds."""

    way: str | None
    steps: list[float]
    """Of each, without what it was held for."""
    held: float
    """The training stood still for the checkpoint: in the call, and before an update."""


def block(name: str | None, taker: Taker | None, trainee: Any, state: State, steps: int) -> Block:
    """At least so many steps, behind a checkpoint if there is a `taker`."""
    held, taken = 0.0, list[float]()
    if taker is not None:
        begin = time.perf_counter()
        taker.take(state)
        held = time.perf_counter() - begin
    while len(taken) < steps or (taker is not None and taker.busy):
        begin = time.perf_counter()
        loss = trainee.gradients()
        waited = 0.0
        if taker is not None:
            since = time.perf_counter()
            taker.before_update()
            waited = time.perf_counter() - since
        trainee.update()
        loss.item()
        taken.append(time.perf_counter() - begin - waited)
        held += waited
    if taker is not None:
        taker.drain()
    return Block(name, taken, held)


def rounds(
    trainee: Any, state: State, takers: dict[str, Taker], asked: argparse.Namespace
) -> list[list[Block]]:
    """Of blocks; none begins behind `--seconds`, but for the first few."""
    order, found = random.Random(asked.seed), []
    end = time.monotonic() + asked.seconds
    for number in range(asked.rounds):
        if number >= LEAST_ROUNDS and time.monotonic() > end:
            break
        blocks = [block(None, None, trainee, state, asked.steps)]
        for name in order.sample(list(takers), len(takers)):
            blocks.append(block(name, takers[name], trainee, state, asked.steps))
            blocks.append(block(None, None, trainee, state, asked.steps))
        found.append(blocks)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--disk", type=Path, required=True, help="a folder on the disk to measure")
    parser.add_argument("--memory", type=Path, required=True, help="a folder in a tmpfs")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="of a block, at least")
    parser.add_argument("--seconds", type=float, required=True, help="behind which no round begins")
    parser.add_argument("--seed", type=int, default=1, help="of the order of ways")
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    module, options = MODELS[asked.model]
    trainee = import_module(module).Trainee(torch.device("cpu"), **options)
    for _ in range(3):  # until the optimizer has its state, and memory is there
        trainee.gradients()
        trainee.update()
    state = state_of(trainee)
    with contextlib.ExitStack() as stack:
        takers = {}
        for name, way in WAYS.items():
            opened = stack.enter_context(way.opened(asked.disk, asked.memory))
            takers[name] = stack.enter_context(contextlib.closing(Taker(opened, way.overlaps)))
            block(name, takers[name], trainee, state, 1)  # what is made once, is made
        found = rounds(trainee, state, takers, asked)
    parameters = sum(one.numel() for one in trainee.model.parameters())
    results = {"parameters": parameters, "state_bytes": bytes_of(state),
               "rounds": [[asdict(one) for one in blocks] for blocks in found]}  # fmt: skip
    asked.output.write_text(json.dumps(results))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
