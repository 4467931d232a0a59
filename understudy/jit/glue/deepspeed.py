"""Just-in-time checkpoints in a loop of DeepSpeed's.

    engine, _, loader, _ = deepspeed.initialize(...)
    loop = JitLoop(engine, "ckpt", job="my")
    for epoch in loop.epochs(10):
        for batch in loop.batches(loader):
            loss = ...(engine(batch)); engine.backward(loss); engine.step()
            loop.boundary()                              # behind each engine.step()
    loop.close()

`engine.save_checkpoint` has barriers in it, which ranks that are dead do not answer; so each rank saves the
module, its own optimizer's state and the engine's counters itself. ZeRO 1 and 2 shard the optimizer's state,
and no other rank has a rank's part: what a killed rank had is lost, which `jit.init` warns of. All shards are
saved together when no rank dies (an exception, SIGTERM, a hang that ends). ZeRO 3 is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine  # type: ignore[import-not-found]

from understudy import jit

from .position import Position

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_PARAMETERS_IN_SHARDS = 3
"""Stage of ZeRO."""


class JitLoop:
    """Where the training is, in epochs, batches and steps of the optimizer.

    `directory` and `options` (`job`, `grace`, `minimum_stall`, ...) are those of `jit.init`. All ranks make
    one, in the main thread. Raises JitError where that does, and for ZeRO 3.
    """

    def __init__(
        self, engine: DeepSpeedEngine, directory: str | os.PathLike[str] = "ckpt", **options: Any
    ) -> None:
        stage = int(engine.zero_optimization_stage())
        if stage >= _PARAMETERS_IN_SHARDS:
            raise jit.JitError(
                "ZeRO 3 has parameters in shards that no other rank has, so there is nothing to save from; "
                "use a lower stage, or engine.save_checkpoint now and then."
            )
        self._engine = engine
        self._in_shards = stage > 0 or type(engine.optimizer).__name__ == "BF16_Optimizer"
        self._position = Position()
        if self._in_shards:
            alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            options = {"replica_group": alone, "shard": f"zero-{dist.get_rank()}"} | options
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
        yield from self._position.epochs(count)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Without those of this epoch that are done, which are loaded once more."""
        for name in ("data_sampler", "sampler"):
            if (set_epoch := getattr(getattr(loader, name, None), "set_epoch", None)) is not None:
                set_epoch(self._position.epoch)
        yield from self._position.through(islice(loader, self._position.batch, None))

    def boundary(self) -> None:
        """`engine.step()` is over. Call it behind each, those amid gradient accumulation included."""
        if self._engine.global_steps != self._counted["global_steps"]:
            self._remember()
            self._position.step_ends()

    def close(self) -> None:
        """Training is over."""
        jit.close()

    def _remember(self) -> None:
        """What counts on inside a step, as of now."""
        self._counted = {name: getattr(self._engine, name) for name in _COUNTERS}
        self._counted |= {"epoch": self._position.epoch, "batch": self._position.batch}

    def _save(self, path: Path) -> None:
        engine = self._engine
        state = {
            "module": engine.module.state_dict(),
            "optimizer": engine.optimizer.state_dict(),
            "scheduler": None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
        }
        torch.save(state | self._counted, path)

    def _load(self, path: Path) -> None:
        engine = self._engine
        # DeepSpeed's sharded optimizers have objects of its own in their state.
        state = torch.load(path, map_location="cpu", weights_only=not self._in_shards)
        engine.module.load_state_dict(state["module"])
        if self._in_shards:  # of a list it takes the one that is this rank's
            engine.optimizer.load_state_dict([state["optimizer"]] * dist.get_world_size())
        else:
            engine.optimizer.load_state_dict(state["optimizer"])
        if engine.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(state["scheduler"])
        for name in _COUNTERS:
            setattr(engine, name, state[name])
        self._position.go_on(state["epoch"], state["batch"])
        self._remember()
