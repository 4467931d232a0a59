"""Just-in-time checkpoints for Lightning's Trainer, as a callback. The ranks are started by `torchrun`.

    jit_callback = JitCallback("ckpt", job="my")
    trainer = lightning.Trainer(..., callbacks=[jit_callback])
    trainer.fit(model, loader, ckpt_path=jit_callback.checkpoint(trainer))

A save is one of Lightning's own checkpoints, with the progress of its loops as of the last step's end, so
that Lightning resumes from it. It does not leave out the batches of an epoch that are done; this callback
does, by loading them once more. A validation that was due, or in progress, when the fault came is run when
the job resumes, and so are the hooks at the end of an epoch. What the module changes in its own
`on_train_batch_end` comes behind the end of a step.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.loops.evaluation_loop import RestartStage
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer import call

from understudy import jit
from understudy.jit.generators import Generators

_OURS = "understudy.jit"


class JitCallback(pl.Callback):  # type: ignore[misc]
    """Opens `jit` before training, ends a step where the optimizer's ends, and resumes.

    `directory`, and all `options` (`job`, `grace`, `minimum_stall`, ...), are those of `jit.init`. Batches of
    gradient accumulation in front of the optimizer's step are done again.
    """

    def __init__(self, directory: str | os.PathLike[str] = "ckpt", **options: Any) -> None:
        self._directory, self._options = directory, options
        self._trainer: pl.Trainer | None = None
        self._found: str | None = None
        self._loaded: dict[str, bool] | None = None
        self._generators: Generators | None = None
        """To be put back where training goes on."""
        self._between_steps = self._validated = False
        self._counted: dict[str, Any] = {}
        """What of Lightning's checkpoint counts on inside a step, as of the last boundary."""

    def checkpoint(self, trainer: pl.Trainer) -> str | None:
        """What `trainer.fit(ckpt_path=...)` takes; None: from the beginning.

        All ranks call it, in the main thread, once in front of each `fit`; the process group is up behind it.
        Raises JitError for a strategy whose state is sharded, for ranks that Lightning would start itself,
        and where `jit.init` does.
        """
        strategy = trainer.strategy
        if type(strategy) not in (DDPStrategy, SingleDeviceStrategy):
            raise jit.JitError(
                f"Lightning's {type(strategy).__name__} is not one whose ranks save alone; use DDPStrategy, "
                "or call understudy.jit in a loop of your own."
            )
        environment = getattr(strategy, "cluster_environment", None)
        if trainer.world_size > 1 and not getattr(environment, "creates_processes_externally", False):
            raise jit.JitError("Lightning starts the other ranks itself here; start all with torchrun.")
        if self not in trainer.callbacks:
            trainer.callbacks.append(self)
        strategy.setup_environment()
        self._trainer, self._loaded, self._counted = trainer, None, {}
        jit.init(self._save, self._directory, **self._options)
        path = jit.get_checkpoint_path()
        self._found = None if path is None else str(path)
        return self._found

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._loaded = checkpoint.get(_OURS)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._trainer != trainer:
            raise jit.JitError(
                "Lightning began without its just-in-time checkpoint; call "
                "trainer.fit(..., ckpt_path=callback.checkpoint(trainer))."
            )
        if self._found is not None and trainer.global_step == 0:
            raise jit.JitError(
                f"Lightning begins behind step 0, and {self._found} is that of step {jit.completed_steps()}; "
                "pass it on as trainer.fit(..., ckpt_path=...)."
            )
        if self._found is None:
            jit.go_on_from(trainer.global_step)
        self._remember(trainer)
        if self._loaded is not None:
            self._go_on(trainer, **self._loaded)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._put_back()
        if self._between_steps:
            jit.keep_generators()
        self._between_steps = False

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._counted["global_step"]:  # amid accumulation
            return
        self._validated = False
        self._remember(trainer)
        jit.boundary()
        self._between_steps = not self._epoch_is_over(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking and self._trainer is trainer:
            self._validated = True
            self._remember_callbacks(trainer)
            jit.keep_generators()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._remember_callbacks(trainer)
        trainer.fit_loop._restarting = False  # else Lightning leaves out schedulers that wait for a metric

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._trainer is trainer:
            self._trainer = None
            jit.close()

    def _go_on(self, trainer: pl.Trainer, epoch_is_over: bool, validated: bool) -> None:
        """Behind the batches that are done, in front of what was not done behind the last one."""
        loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
        if not epoch_is_over:
            for loader in trainer.fit_loop._combined_loader.flattened:
                _set_sampler_epoch(loader, trainer.fit_loop.epoch_progress.current.processed)
            iter(fetcher)  # in the order of this epoch
            for _ in range(loop.batch_progress.current.ready):
                next(fetcher)
            fetcher.fetched = 0  # Lightning adds them again
        else:
            fetcher.done = True
        if jit.restore_generators():
            self._generators = Generators.now()
        validates = loop._should_check_val_fx(fetcher)
        if validates and not validated:
            loop.val_loop._restart_stage = RestartStage.RESTARTED_MID_EVALUATION
            loop.val_loop.batch_progress.reset_on_run()
        if epoch_is_over or (validates and not validated):
            self._put_back()
        if epoch_is_over and not validates:
            loop._batches_that_stepped += 1

    def _put_back(self) -> None:
        if self._generators is not None:
            self._generators.put_back()
            self._generators = None

    def _remember(self, trainer: pl.Trainer) -> None:
        loops = copy.deepcopy(trainer._checkpoint_connector._get_loops_state_dict())
        if self._epoch_is_over(trainer):  # its last batch is complete, so that Lightning finishes the epoch
            for which in ("total", "current"):
                loops["fit_loop"]["epoch_loop.batch_progress"][which]["completed"] += 1
        schedules = [one.scheduler for one in trainer.lr_scheduler_configs]
        self._counted = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "loops": loops,
            "lr_schedulers": [copy.deepcopy(one.state_dict()) for one in schedules],
        }
        self._remember_callbacks(trainer)

    def _remember_callbacks(self, trainer: pl.Trainer) -> None:
        """At the end of an epoch, which is done again. Within it, theirs is the state of the moment."""
        self._counted.pop("callbacks", None)
        if self._epoch_is_over(trainer):
            self._counted["callbacks"] = copy.deepcopy(call._call_callbacks_state_dict(trainer))

    def _epoch_is_over(self, trainer: pl.Trainer) -> bool:
        """Its batches are."""
        return bool(trainer.fit_loop.epoch_loop._num_ready_batches_reached())

    def _save(self, path: Path) -> None:
        """As `trainer.save_checkpoint`, without its barrier."""
        trainer = self._trainer
        assert trainer is not None, "a save comes between checkpoint() and the end of training"
        progress = self._counted["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        over = progress["total"]["completed"] == progress["total"]["processed"]
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False) | self._counted
        torch.save(checkpoint | {_OURS: {"epoch_is_over": over, "validated": self._validated}}, path)
