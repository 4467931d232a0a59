"""transformers' Trainer with its defaults: pinned memory, workers, evaluation, saving, and a second one that resumes."""

import sys
from pathlib import Path

from shared import Characters, text, tiny_llama
from transformers import Trainer, TrainingArguments

TEXT, OUT = text(sys.argv[1]), Path(sys.argv[2])
EAGER = {"attn_implementation": "eager"} if "eager" in sys.argv[3:] else {}
SWITCHES = dict.fromkeys([word for word in sys.argv[3:] if word != "eager"], True)


def trainer(steps: int) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(OUT / "model"), max_steps=steps, save_steps=6, eval_steps=6, eval_strategy="steps",
        logging_steps=2, dataloader_num_workers=2, report_to="none", **SWITCHES,
    )  # fmt: skip
    return Trainer(
        tiny_llama(**EAGER),
        arguments,
        train_dataset=Characters(TEXT, 64),
        eval_dataset=Characters(TEXT[4000:], 16),
    )


trainer(6).train()
second = trainer(12)
second.train(resume_from_checkpoint=True)
for entry in second.state.log_history:
    print(
        "KEPT",
        {name: value for name, value in entry.items() if name in ("loss", "eval_loss", "grad_norm")},
        flush=True,
    )
