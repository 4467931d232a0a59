"""A training whose state is replicated, sharded or split, in which a rank fails at a place of a step.

    jit_places.py PARALLELISM STEPS faults DIRECTORY MINIMUM_STALL [PLACE:ACTION:RANK:STEP …]
    jit_places.py PARALLELISM STEPS undisturbed FOLDER        without `understudy.jit`; lines go into files

Each fault has an attempt of its own, in their order: the first one happens in the first attempt. Steps count
from 0. A rank prints its loss and a digest of what it has of the parameters behind each step, in bits.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jit_parallelism import BATCH, PARALLELISMS, Job
from jit_step_places import GATE, PLACES, REDUCTIONS
from leaves_at_once import leave

from understudy import jit

ACTIONS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hold": lambda: ctypes.PyDLL(None).sleep(1000),  # in C, with the GIL
}


@dataclass
class Fault:
    """Of this attempt; `reach` is called at each place."""

    place: str
    action: str
    rank: int
    step: int
    now: int = -1

    @classmethod
    def of(cls, text: str) -> Fault:
        place, action, rank, step = text.split(":")
        assert place in (*PLACES, GATE) and action in ACTIONS, text
        return cls(place, action, int(rank), int(step))

    def reach(self, place: str) -> None:
        if (place, self.now, dist.get_rank()) == (self.place, self.step, self.rank):
            self.happen()

    def happen(self) -> None:
        print(f"fault: {self.place} {self.action} pid {os.getpid()}", file=sys.stderr, flush=True)
        ACTIONS[self.action]()

    def at_gate(self) -> None:
        """In front of the optimizer: one rank comes half a second late, the one that fails waits for it."""
        if self.place != GATE or self.now != self.step:
            return
        if dist.get_rank() == self.rank:
            threading.Timer(0.25, self.happen).start()
        elif dist.get_rank() == (self.rank + 1) % dist.get_world_size():
            time.sleep(0.5)


NO_FAULT = Fault("batch", "kill", -1, -1)


class Reductions:
    """Counts those of a step's gradients, and says which of the last ones comes."""

    def __init__(self, reach: Callable[[str], None]) -> None:
        self._reach = reach
        self.count, self.of_a_step = 0, 0
        self._is_under_way = False

    def begin(self) -> None:
        self._is_under_way = True

    def comes(self) -> None:
        if not self._is_under_way:
            return
        if self.of_a_step and (number := self.count - self.of_a_step + REDUCTIONS) >= 0:
            self._reach(f"reduction-{number}")
        self.count += 1

    def end(self) -> None:
        self._is_under_way = False
        self.of_a_step, self.count = self.count, 0


def instrument(fault: Fault, job: Job) -> None:
    """Forward and backward passes of each layer, and each group of the optimizer."""
    for number, layer in job.layers:

        def before(_: Any, given: tuple[torch.Tensor], number: int = number) -> None:
            fault.reach(f"before-forward-{number}")
            if given[0].requires_grad:
                given[0].register_hook(lambda _: fault.reach(f"behind-backward-{number}"))

        def behind(_: Any, __: Any, output: torch.Tensor, number: int = number) -> None:
            fault.reach(f"behind-forward-{number}")
            output.register_hook(lambda _: fault.reach(f"before-backward-{number}"))

        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(behind)
    job.on_group = lambda number: fault.reach(f"optimizer-{number}")


def batch_of(job: Job, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of this rank's replica: it depends on step and replica alone."""
    generator = torch.Generator().manual_seed(1000 * step + job.replica)
    points = torch.rand(BATCH, 6, generator=generator).requires_grad_()
    return points, (points.detach().norm(dim=1, keepdim=True) < 1.4).float()


def digest(job: Job) -> str:
    """Of the parameters, as this rank has them."""
    found = hashlib.blake2b(digest_size=4)
    for tensor in _tensors(jit.local_state(model=job.model)):
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)


def train(
    fault: Fault, job: Job, steps: range, say: Callable[[str], object], boundary: Callable[[], None]
) -> None:
    reductions = Reductions(fault.reach)
    job.on_reduction = reductions.comes
    for step in steps:
        fault.now = step
        fault.reach("batch")
        points, inside = batch_of(job, step)
        fault.reach("zero-grad")
        job.optimizer.zero_grad()
        reductions.begin()
        loss = job.forward_and_backward(points, inside, fault.reach)
        reductions.end()
        fault.reach("behind-backward")
        fault.at_gate()
        job.optimizer.step()
        fault.reach("behind-optimizer")
        job.scheduler.step()
        fault.reach("behind-scheduler")
        bits = struct.pack(">f", loss).hex()
        say(f"step {step + 1}  rank {dist.get_rank()}  loss {bits}  has {digest(job)}\n")
        fault.reach("boundary")
        boundary()
        fault.reach("behind-boundary")


def say(line: str) -> None:
    """In one piece, beside those of other ranks."""
    os.write(1, line.encode())


def undisturbed(job: Job, steps: int, folder: Path) -> None:
    with open(folder / f"rank-{dist.get_rank()}", "w") as file:
        train(NO_FAULT, job, range(steps), file.write, lambda: None)


def disturbed(job: Job, steps: int, directory: str, minimum_stall: float, faults: Sequence[str]) -> None:
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    fault = Fault.of(faults[attempt]) if attempt < len(faults) else NO_FAULT
    instrument(fault, job)
    parts = {"model": job.model, "optimizer": job.optimizer, "scheduler": job.scheduler}

    def save(path: Path) -> None:
        torch.save(jit.local_state(**parts), path)

    jit.init(save, directory, job.replicas, job.shard, job="places", minimum_stall=minimum_stall)
    if (path := jit.get_checkpoint_path()) is not None:
        jit.load_local_state(torch.load(path, weights_only=True), **parts)
        assert jit.restore_generators()
    start = jit.completed_steps()
    if dist.get_rank() == 0:
        say(f"goes on behind step {start}\n")
    train(fault, job, range(start, steps), say, jit.boundary)
    dist.barrier()
    jit.close()


def main() -> None:
    parallelism, steps, how, place, *rest = sys.argv[1:]
    dist.init_process_group("gloo")
    job = PARALLELISMS[parallelism]()
    if how == "undisturbed":
        undisturbed(job, int(steps), Path(place))
        dist.barrier()
    else:
        disturbed(job, int(steps), place, float(rest[0]), rest[1:])
    leave()


if __name__ == "__main__":
    main()
