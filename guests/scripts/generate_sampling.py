"""transformers' `generate`: greedy, beams with penalties, and sampling, seeded as its documentation shows it."""

import torch
from shared import DEVICE, tiny_llama
from transformers import set_seed

model = tiny_llama(128, pad_token_id=0, bos_token_id=1, eos_token_id=None).to(DEVICE).eval()
prompt = torch.arange(2, 26).reshape(2, 12).to(DEVICE)
for options in (
    {"do_sample": False},
    {"num_beams": 3, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
    {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8},
):
    set_seed(7)
    print("KEPT", model.generate(prompt, max_new_tokens=20, **options).tolist(), flush=True)
