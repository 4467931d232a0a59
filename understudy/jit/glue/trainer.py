"""Just-in-time checkpoints for Hugging Face's `Trainer`, as a callback.

    jit_callback = JitCallback("ckpt", job="my")
    trainer = Trainer(..., callbacks=[jit_callback])
    trainer.train(resume_from_checkpoint=jit_callback.checkpoint(trainer))

A save has the layout of the Trainer's own checkpoints, so that the Trainer resumes from it, and leaves out
the batches of the epoch that are done. The Trainer's own checkpoints (`save_strategy`) compete by step.

Generators are not in it, because those of a rank that was killed are in no replica's save: each rank takes
its own from `DIR/slots`, at the place in an epoch where the Trainer would read them from its checkpoint.

What the Trainer does behind a step (evaluation, its own checkpoint) and had not done when the fault came, it
does when it resumes: an evaluation draws numbers, and metrics decide what comes next. The loss of that step
is not logged then, because a part of it was the killed rank's.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.utils import WEIGHTS_NAME

from understudy import jit
from understudy.jit.generators import Generators

_DUE = "jit.json"
_TIMINGS = ("_runtime", "_per_second")
"""Ends of names in the log's entries that each rank measures by itself: replicas would differ in them."""


class JitCallback(TrainerCallback):  # type: ignore[misc]
    """Opens `jit` before training, ends a step where the Trainer ends one, and resumes.

    `directory`, and all `options` (`job`, `grace`, `minimum_stall`, ...), are those of `jit.init`. A step is
    one of the optimizer's: micro-batches of gradient accumulation in front of it are done again.
    """

    def __init__(self, directory: str | os.PathLike[str] = "ckpt", **options: Any) -> None:
        self._directory, self._options = directory, options
        self._trainer: Trainer | None = None
        self._found: str | None = None
        self._generators: Generators | None = None
        """To be put back where training goes on."""
        self._epoch_begins = False
        self._epoch_ended = False
        self._own_checkpoint: tuple[Path, int] | None = None
        self._counted: dict[str, Any] = {}
        """What of the Trainer's state counts on inside a step, as of the last boundary."""

    def checkpoint(self, trainer: Trainer) -> str | None:
        """What `trainer.train(resume_from_checkpoint=...)` takes; None: from the beginning.

        All ranks call it, in the main thread, once in front of each `train`. Raises JitError for a Trainer
        whose state is sharded, and where `jit.init` does.
        """
        for name in ("is_fsdp_enabled", "is_deepspeed_enabled"):
            if getattr(trainer, name, False):
                raise jit.JitError(
                    f"This Trainer shards its state ({name}), and its checkpoints need collectives; use DDP, "
                    "or call understudy.jit in a loop of your own."
                )
        if self in trainer.callback_handler.callbacks:
            trainer.remove_callback(self)
        trainer.add_callback(self)  # as the last one: nothing of a step changes behind it
        self._trainer = trainer
        jit.init(self._save, self._directory, **self._options)
        path = jit.get_checkpoint_path()
        self._found = None if path is None else str(path)
        return self._found

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._trainer is None:
            raise jit.JitError(
                "The Trainer began without its just-in-time checkpoint; call "
                "trainer.train(resume_from_checkpoint=callback.checkpoint(trainer))."
            )
        if self._found is not None and state.global_step != jit.completed_steps():
            raise jit.JitError(
                f"The Trainer begins behind step {state.global_step}, and {self._found} is that of step "
                f"{jit.completed_steps()}; pass it on as trainer.train(resume_from_checkpoint=...)."
            )
        jit.go_on_from(state.global_step)
        self._remember(state)
        if self._found is not None:
            restored = jit.restore_generators()
            self._do_what_is_due(args, state, control)
            self._generators = Generators.now() if restored else None

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._epoch_begins, self._epoch_ended = True, False
        if args.ignore_data_skip or float(state.epoch).is_integer():
            self._put_back()  # where the Trainer reads them: in front of the loader, which draws from them
        jit.keep_generators()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._put_back()  # amid an epoch: behind the batches that are left out
        if not self._epoch_begins:  # an evaluation may lie between the last step's end and here
            jit.keep_generators()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._epoch_begins = False
        self._remember(state)
        jit.boundary()
        self._tell_of_own_checkpoint()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._epoch_ended = True

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._trainer is not None:  # an evaluation without a training before it has no step
            jit.keep_generators()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        trainer = self._trainer
        if trainer is not None and args.should_save and not args.save_only_model:
            folder = f"checkpoint-{state.global_step}"
            self._own_checkpoint = (Path(trainer._get_output_dir(trial=None)) / folder, state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._trainer is not None:
            self._trainer = None
            jit.close()

    def _put_back(self) -> None:
        if self._generators is not None:
            self._generators.put_back()
            self._generators = None

    def _do_what_is_due(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """As the Trainer does behind a step, and behind an epoch."""
        trainer, due = self._trainer, _read(self._found)
        assert trainer is not None
        for at_end, evaluate, save in ((False, *due[:2]), (due[2], False, False)):
            if at_end:
                trainer.callback_handler.on_epoch_end(args, state, control)
            control.should_log = False
            control.should_evaluate |= evaluate
            control.should_save |= save
            if control.should_evaluate or control.should_save:
                nothing = torch.tensor(0.0, device=args.device)
                trainer._maybe_log_save_evaluate(
                    nothing, None, trainer.model_wrapped, None, state.epoch, None, time.time()
                )

    def _remember(self, state: TrainerState) -> None:
        names = ("global_step", "epoch", "num_input_tokens_seen")
        self._counted = {name: getattr(state, name) for name in names}

    def _tell_of_own_checkpoint(self) -> None:
        """A step later, because only then have all ranks surely written their parts of it."""
        if self._own_checkpoint is not None:
            (path, step), self._own_checkpoint = self._own_checkpoint, None
            try:
                jit.saved(path, step)
            except (jit.JitError, OSError) as error:  # `save_total_limit` may have removed it
                warnings.warn(f"The checkpoint {path} does not compete: {error}", stacklevel=2)

    def _save(self, path: Path) -> None:
        """In the Trainer's layout, and the same bytes on all replicas."""
        trainer = self._trainer
        assert trainer is not None, "a save comes between checkpoint() and the end of training"
        path.mkdir()
        torch.save(trainer.model.state_dict(), path / WEIGHTS_NAME)
        torch.save(trainer.optimizer.state_dict(), path / OPTIMIZER_NAME)
        torch.save(trainer.lr_scheduler.state_dict(), path / SCHEDULER_NAME)
        if (scaler := getattr(trainer.accelerator, "scaler", None)) is not None:
            torch.save(scaler.state_dict(), path / SCALER_NAME)
        self._state(trainer).save_to_json(str(path / TRAINER_STATE_NAME))
        epoch_is_over = float(self._counted["epoch"]).is_integer() and not self._epoch_ended
        due = [bool(trainer.control.should_evaluate), bool(trainer.control.should_save), epoch_is_over]
        (path / _DUE).write_text(json.dumps(due))

    def _state(self, trainer: Trainer) -> TrainerState:
        """The Trainer's, without what differs between ranks."""
        found: dict[str, list[Any]] = {}
        for one in [*trainer.callback_handler.callbacks, trainer.control]:
            if isinstance(one, ExportableState):
                found.setdefault(type(one).__name__, []).append(one.state())
        return dataclasses.replace(
            trainer.state, **self._counted, is_local_process_zero=False, is_world_process_zero=False,
            stateful_callbacks={name: one if len(one) > 1 else one[0] for name, one in found.items()},
            log_history=[
                {name: value for name, value in entry.items() if not name.endswith(_TIMINGS)}
                for entry in trainer.state.log_history
            ],
        )  # fmt: skip


def _read(checkpoint: str | None) -> tuple[bool, bool, bool]:
    """What is due behind a save: evaluation, checkpoint, end of an epoch. Nothing, in the Trainer's own."""
    place = Path(checkpoint or "") / _DUE
    evaluate, save, epoch_end = json.loads(place.read_text()) if place.is_file() else (False, False, False)
    return evaluate, save, epoch_end
