"""`examples/jit_checkpoint.py`, in which a rank fails at a chosen place of a chosen step.

    jit_faults.py PLACE:ACTION:RANK:STEP[,…] <the example's own arguments>

Each fault has an attempt of its own, in their order: the first one happens in the first attempt. Steps count
from 0. What the example does is left as it is; it is only stopped on its way.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import jit_checkpoint as example
from leaves_at_once import leave

from understudy import jit

PLACES = ("batch", "forward", "loss", "backward", "gradients", "optimizer", "behind-optimizer", "boundary")
ACTIONS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": lambda: (_ for _ in ()).throw(RuntimeError("chosen by the test")),  # type: ignore[dict-item]
    "exit": lambda: os._exit(7),
    "hold": lambda: ctypes.PyDLL(None).sleep(1000),  # in C, with the GIL
    "work": lambda: time.sleep(6),
}


class Fault:
    """Of this attempt; `reach` is called at each place."""

    def __init__(self, text: str) -> None:
        self.place, self.action, rank, step = text.split(":")
        self.rank, self.step = int(rank), int(step)
        assert self.place in PLACES and self.action in ACTIONS
        self.now = -1

    def reach(self, place: str) -> None:
        if (place, self.now, int(os.environ["RANK"])) == (self.place, self.step, self.rank):
            print(f"fault: {place} {self.action} pid {os.getpid()}", file=sys.stderr, flush=True)
            ACTIONS[self.action]()


def instrument(fault: Fault) -> None:
    """Every place of a step, from its batch on to its boundary."""

    class AdamW(torch.optim.AdamW):
        """Two groups of parameters, the first of which is new when the second one is begun."""

        def __init__(self, parameters: Any, **settings: Any) -> None:
            ones = list(parameters)
            super().__init__([{"params": ones[:3]}, {"params": ones[3:]}], **settings)

        def _init_group(self, group: Any, *rest: Any) -> Any:
            if group is self.param_groups[1]:
                fault.reach("optimizer")
            return super()._init_group(group, *rest)

    class Model(torch.nn.parallel.DistributedDataParallel):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__(module)
            module[2].register_forward_hook(lambda *_: fault.reach("forward"))  # type: ignore[index]
            module[0].weight.register_hook(lambda _: fault.reach("backward"))  # type: ignore[index,operator]

    original_batch, original_loss = example.batch_of, torch.nn.functional.binary_cross_entropy_with_logits
    original_backward = torch.Tensor.backward
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR
    original_schedule = schedule.step

    def batch_of(step: int, rank: int, size: int) -> Any:
        fault.now = step
        fault.reach("batch")
        return original_batch(step, rank, size)

    def loss_of(*values: Any) -> torch.Tensor:
        loss = original_loss(*values)
        fault.reach("loss")
        return loss

    def backward(self: torch.Tensor, *rest: Any, **named: Any) -> None:
        original_backward(self, *rest, **named)
        fault.reach("gradients")

    def step_of_scheduler(self: Any, *rest: Any) -> None:
        fault.reach("behind-optimizer")
        original_schedule(self, *rest)

    def boundary() -> None:
        fault.reach("boundary")
        jit.boundary()

    torch.optim.AdamW = AdamW  # type: ignore[misc]
    example.DistributedDataParallel = Model  # type: ignore[misc]
    example.batch_of = batch_of
    torch.nn.functional.binary_cross_entropy_with_logits = loss_of
    torch.Tensor.backward = backward  # type: ignore[method-assign]
    schedule.step = step_of_scheduler  # type: ignore[method-assign]
    example.jit = Jit(boundary)  # type: ignore[assignment]


class Jit:
    """`understudy.jit` with another `boundary`."""

    def __init__(self, boundary: Callable[[], None]) -> None:
        self.boundary = boundary

    def __getattr__(self, name: str) -> Any:
        return getattr(jit, name)


def main() -> None:
    faults = [one for one in sys.argv.pop(1).split(",") if one]
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    instrument(Fault(faults[attempt] if attempt < len(faults) else "batch:kill:-1:-1"))
    example.main()
    leave()


if __name__ == "__main__":
    main()
