"""GPT-2 and BERT of transformers in training with their default dropout, and batches that are padded."""

import sys

import torch
from shared import DEVICE, text
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

SMALL = {"vocab_size": 256, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
MODELS = (
    lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **SMALL)),
    lambda: BertForMaskedLM(
        BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, **SMALL)
    ),
)
tokens = torch.tensor(list(text(sys.argv[1]).encode()))
for make in MODELS:
    torch.manual_seed(0)
    model = make().to(DEVICE).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(8):
        batch = tokens[step * 128 : (step + 1) * 128].reshape(4, 32).clone()
        mask = torch.ones_like(batch)
        for row in range(4):
            mask[row, 32 - 3 * row :] = 0
        labels = batch.masked_fill(mask == 0, -100)
        torch.manual_seed(100 + step)
        loss = model(
            input_ids=batch.to(DEVICE), attention_mask=mask.to(DEVICE), labels=labels.to(DEVICE)
        ).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("KEPT", loss.item(), flush=True)
