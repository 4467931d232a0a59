"""Just-in-time checkpoints in a loop of accelerate's.

    loop = JitLoop(accelerator, "ckpt", job="my")        # behind prepare() and register_for_checkpointing()
    for epoch in loop.epochs(10):
        for batch in loop.batches(loader):
            with accelerator.accumulate(model):
                ...; optimizer.step(); scheduler.step(); optimizer.zero_grad()
            loop.boundary()                              # behind each micro-batch
        evaluate()
    loop.close()

What `accelerator.prepare` and `register_for_checkpointing` were given is saved, and loaded when the loop is
made. It goes on behind the last step of the optimizer: micro-batches in front of the next one are done again,
and so is what the script does behind an epoch's last batch, if no step of the next epoch was completed. What
it does inside the loop behind `boundary()` is not.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, synchronize_rng_states

from understudy import jit

from .position import Position

_REPLICATED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class JitLoop:
    """Where the training is, in epochs, batches and steps of the optimizer.

    `directory` and `options` (`job`, `grace`, `minimum_stall`, ...) are those of `jit.init`. All ranks make
    one, in the main thread. Raises JitError where that does, and for state that is sharded.
    """

    def __init__(
        self, accelerator: Accelerator, directory: str | os.PathLike[str] = "ckpt", **options: Any
    ) -> None:
        if accelerator.distributed_type not in _REPLICATED:
            raise jit.JitError(
                f"accelerate runs this as {accelerator.distributed_type}, whose state is sharded and needs "
                "collectives to be saved; use DDP, or call understudy.jit in a loop of your own."
            )
        self._accelerator = accelerator
        self._position = Position()
        self._order: torch.Tensor | None = None
        """Of the generator that orders samples, as the epoch began."""
        jit.init(self._save, directory, **options)
        self._remember()
        if (path := jit.get_checkpoint_path()) is not None:
            self._load(path)

    @property
    def step(self) -> int:
        """Steps of the optimizer that are completed."""
        return jit.completed_steps()

    def epochs(self, count: int) -> Iterator[int]:
        """Those that are left of so many, the one in progress first."""
        for epoch in self._position.epochs(count):
            yield epoch
            self._order = None

    def batches(self, loader: Any) -> Iterator[Any]:
        """Of a loader that was prepared, without those of this epoch that are done."""
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(self._position.epoch)
        self._set_order(loader)
        done = self._position.batch
        yield from self._position.through(
            self._accelerator.skip_first_batches(loader, done) if done else loader
        )

    def boundary(self) -> None:
        """A micro-batch ends here: everything that it changes has changed. Call it behind each."""
        if self._accelerator.sync_gradients:
            self._remember()
            self._position.step_ends()

    def close(self) -> None:
        """Training is over."""
        jit.close()

    def _set_order(self, loader: Any) -> None:
        """Samples come in the order that the undisturbed epoch has; this is how it began."""
        generator = getattr(loader, "synchronized_generator", None)
        if generator is None:  # one process, whose sampler asks PyTorch's own generator
            if self._order is not None:
                torch.set_rng_state(self._order)
            self._order = torch.get_rng_state()
            return
        if self._order is not None:
            generator.set_state(self._order)
        elif self._accelerator.num_processes > 1:
            synchronize_rng_states(["generator"], generator)
        self._order = generator.get_state()

    def _remember(self) -> None:
        """What counts on inside a step, as of now: accelerate counts schedulers in each micro-batch."""
        self._counted = {
            "epoch": self._position.epoch,
            "batch": self._position.batch,
            "order": self._order,
            "micro-batch": self._accelerator.step,
            "schedulers": [copy.deepcopy(one.state_dict()) for one in self._accelerator._schedulers],
        }

    def _save(self, path: Path) -> None:
        accelerator = self._accelerator
        state = {
            "models": [one.state_dict() for one in accelerator._models],
            "optimizers": [one.state_dict() for one in accelerator._optimizers],
            "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
            "registered": [one.state_dict() for one in accelerator._custom_objects],
        }
        torch.save(state | self._counted, path)

    def _load(self, path: Path) -> None:
        accelerator = self._accelerator
        state = torch.load(path, map_location="cpu", weights_only=True)
        for name, parts in (
            ("models", accelerator._models), ("optimizers", accelerator._optimizers),
            ("schedulers", accelerator._schedulers), ("registered", accelerator._custom_objects),
        ):  # fmt: skip
            if len(parts) != len(state[name]):
                raise jit.JitError(
                    f"The checkpoint {path} has {len(state[name])} {name}, and {len(parts)} were prepared; "
                    "prepare and register what it was saved from, in front of JitLoop."
                )
            for part, its in zip(parts, state[name], strict=True):
                part.load_state_dict(its)
        if accelerator.scaler is not None and state["scaler"] is not None:
            accelerator.scaler.load_state_dict(state["scaler"])
        self._position.go_on(state["epoch"], state["batch"])
        self._order, accelerator.step = state["order"], state["micro-batch"]
        self._remember()
