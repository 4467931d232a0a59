"""TRL's trainers with their defaults: `python preferences.py sft|dpo|grpo TEXT OUT`."""

import sys

from datasets import Dataset
from shared import byte_tokenizer, text, tiny_llama
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

KIND, TEXT, OUT = sys.argv[1], text(sys.argv[2]), sys.argv[3]
tokenizer = byte_tokenizer()
tiny_llama(len(tokenizer), pad_token_id=0, bos_token_id=1, eos_token_id=2).save_pretrained(f"{OUT}/start")
tokenizer.save_pretrained(f"{OUT}/start")
model = f"{OUT}/start"
lines = [line for line in TEXT.splitlines() if 20 < len(line) < 60][:32]
common = {"output_dir": OUT, "max_steps": 6, "logging_steps": 1, "report_to": "none", "save_strategy": "no"}
match KIND:
    case "sft":
        trainer = SFTTrainer(
            model, args=SFTConfig(per_device_train_batch_size=2, **common),
            train_dataset=Dataset.from_dict({"text": lines}), processing_class=tokenizer,
        )  # fmt: skip
    case "dpo":
        rows = {"prompt": [one[:10] for one in lines], "chosen": [one[10:] for one in lines],
                "rejected": [one[:9:-1] for one in lines]}  # fmt: skip
        trainer = DPOTrainer(
            model, args=DPOConfig(per_device_train_batch_size=2, **common), train_dataset=Dataset.from_dict(rows),
            processing_class=tokenizer,
        )  # fmt: skip
    case _:

        def vowels(completions: list[str], **_: object) -> list[float]:
            return [sum(letter in "aeiou" for letter in one) / (1 + len(one)) for one in completions]

        trainer = GRPOTrainer(
            model, reward_funcs=vowels, processing_class=tokenizer,
            args=GRPOConfig(per_device_train_batch_size=4, num_generations=4, max_completion_length=12, **common),
            train_dataset=Dataset.from_dict({"prompt": [one[:10] for one in lines]}),
        )  # fmt: skip
trainer.train()
for entry in trainer.state.log_history:
    print("KEPT", entry.get("loss"), entry.get("grad_norm"), flush=True)
