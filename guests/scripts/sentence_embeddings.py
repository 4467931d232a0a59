"""sentence-transformers: its trainer with a BERT of random weights, then `encode`."""

import sys

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from shared import byte_tokenizer, text
from transformers import BertConfig, BertModel, set_seed

OUT = sys.argv[2]
set_seed(3)
tokenizer = byte_tokenizer()
config = BertConfig(
    vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
BertModel(config).save_pretrained(f"{OUT}/bert")
tokenizer.model_max_length = 64
tokenizer.save_pretrained(f"{OUT}/bert")
words = Transformer(f"{OUT}/bert")
model = SentenceTransformer(modules=[words, Pooling(32)])
lines = [line for line in text(sys.argv[1]).splitlines() if 20 < len(line) < 60][:65]
pairs = Dataset.from_dict({"anchor": lines[:-1], "positive": lines[1:]})
arguments = SentenceTransformerTrainingArguments(
    output_dir=f"{OUT}/run", max_steps=8, logging_steps=1, report_to="none"
)
trainer = SentenceTransformerTrainer(
    model, arguments, train_dataset=pairs, loss=MultipleNegativesRankingLoss(model)
)
trainer.train()
for entry in trainer.state.log_history:
    print("KEPT", entry.get("loss"), entry.get("grad_norm"), flush=True)
print("KEPT", model.encode(lines[:4]).tolist(), flush=True)
