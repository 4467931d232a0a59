"""Hugging Face Trainer on a small GPT-2 made from its configuration.

An ordinary script: it knows of no proxy. `--device cpu` is what its reference run asks for.
"""

import argparse
from pathlib import Path

import torch
from results import write
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--text", type=Path, help="trained on, byte by byte; without it, on a made-up text")
parser.add_argument("--steps", type=int, default=6)
args = parser.parse_args()

BLOCK = 32


class Bytes(torch.utils.data.Dataset):
    def __init__(self, content: bytes) -> None:
        self.tokens = torch.tensor(list(content))

    def __len__(self) -> int:
        return len(self.tokens) // BLOCK

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        block = self.tokens[index * BLOCK : (index + 1) * BLOCK]
        return {"input_ids": block, "labels": block}


class Losses(TrainerCallback):
    """The losses as the Trainer reports them, rounded by nobody."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:  # type: ignore[no-untyped-def]
        if logs and "loss" in logs:
            self.seen += [logs["loss"], logs["grad_norm"]]


text = args.text.read_bytes()[:20_000] if args.text else bytes((7 * i * i + i // 5) % 251 for i in range(20_000))
torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=256, n_positions=BLOCK, n_embd=32, n_layer=2, n_head=2,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
)
losses = Losses()
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=str(args.out) + ".trainer",
        max_steps=args.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=args.device == "cpu",
    ),
    train_dataset=Bytes(text),
    callbacks=[losses],
)
trainer.train()
assert trainer.args.device.type == args.device, trainer.args.device
write(args.out.with_name(f"{args.out.name}.{trainer.args.process_index}"), losses.seen, model)
print("trained", trainer.state.global_step, "steps on", trainer.args.device, flush=True)
