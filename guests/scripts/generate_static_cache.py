"""transformers' `generate` with a static cache, which compiles the forward pass by itself."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = LlamaForCausalLM(config).to(device).eval()
prompt = torch.arange(2, 26).reshape(2, 12).to(device)
for _ in range(3):
    tokens = model.generate(prompt, max_new_tokens=24, do_sample=False, cache_implementation="static")
    print("KEPT", tokens.tolist(), flush=True)
