"""transformers' Trainer with its defaults: pinned memory, workers, evaluation, saving, and a second Trainer resuming."""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

TEXT, OUT = Path(sys.argv[1]), Path(sys.argv[2])
LENGTH = 32


class Characters(torch.utils.data.Dataset):
    """Windows of a text."""

    def __init__(self, text: str, count: int) -> None:
        self.tokens, self.count = torch.tensor(list(text.encode())), count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.tokens[index * LENGTH : (index + 1) * LENGTH]
        return {"input_ids": window, "labels": window}


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64,
        )
    )  # fmt: skip


def trainer(steps: int, *more: str) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(OUT / "model"),
        max_steps=steps,
        save_steps=6,
        eval_steps=6,
        eval_strategy="steps",
        logging_steps=2,
        dataloader_num_workers=2,
        report_to="none",
        **dict.fromkeys(more, True),
    )
    text = TEXT.read_text()
    return Trainer(
        model(), arguments, train_dataset=Characters(text, 64), eval_dataset=Characters(text[4000:], 16)
    )


first = trainer(6, *sys.argv[3:])
first.train()
second = trainer(12, *sys.argv[3:])
second.train(resume_from_checkpoint=True)
for entry in second.state.log_history:
    print("KEPT", {name: value for name, value in entry.items() if "loss" in name}, flush=True)
