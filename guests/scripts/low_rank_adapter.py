"""peft's LoRA in transformers' Trainer, with the adapter saved, loaded and merged."""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from shared import DEVICE, Characters, text, tiny_llama
from transformers import Trainer, TrainingArguments

OUT = Path(sys.argv[2])
adapted = get_peft_model(tiny_llama(), LoraConfig(r=4, task_type="CAUSAL_LM"))
arguments = TrainingArguments(output_dir=str(OUT / "run"), max_steps=10, logging_steps=2, report_to="none")
trainer = Trainer(adapted, arguments, train_dataset=Characters(text(sys.argv[1]), 96))
trainer.train()
adapted.save_pretrained(str(OUT / "adapter"))
merged = PeftModel.from_pretrained(tiny_llama(), str(OUT / "adapter")).merge_and_unload().to(DEVICE).eval()
with torch.no_grad():
    print("KEPT", merged(torch.arange(32, device=DEVICE)[None]).logits.double().sum().item(), flush=True)
for entry in trainer.state.log_history:
    print("KEPT", entry.get("loss"), entry.get("grad_norm"), flush=True)
