"""transformers' Trainer with the callback of `understudy.jit`: dropout, accumulation, evaluation, own checkpoints.

`jit_trainer.py TEXT OUT`, under torchrun.
"""

import sys
from pathlib import Path

from shared import Characters, text, tiny_llama
from struck import EPOCHS, finish, struck, tell
from transformers import Trainer, TrainerCallback, TrainingArguments

from understudy.jit.glue.trainer import JitCallback

TEXT, OUT = text(sys.argv[1]), Path(sys.argv[2])


class Tell(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **more):
        if "loss" in logs:
            tell(state.global_step, logs["loss"])


arguments = TrainingArguments(
    output_dir=str(OUT / "model"), num_train_epochs=EPOCHS, per_device_train_batch_size=2, gradient_accumulation_steps=2,
    eval_steps=3, eval_strategy="steps", save_steps=5, save_total_limit=1, logging_steps=1, report_to="none",
    use_cpu=True, seed=1, disable_tqdm=True,
)  # fmt: skip
model = tiny_llama(attention_dropout=0.1)
jit_callback = JitCallback(OUT / "ckpt", job="trainer", minimum_stall=20)
trainer = Trainer(
    model,
    arguments,
    train_dataset=Characters(TEXT, 64),
    eval_dataset=Characters(TEXT[4000:], 8),
    callbacks=[Tell(), jit_callback],
)
struck(model)
trainer.train(resume_from_checkpoint=jit_callback.checkpoint(trainer))
finish(trainer.model, trainer.optimizer)
