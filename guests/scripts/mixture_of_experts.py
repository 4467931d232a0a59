"""Mixtures of experts of transformers: `python mixture_of_experts.py TEXT NAME`."""

import sys

import torch
import transformers
from shared import DEVICE, Characters, text

COMMON = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "output_router_logits": True,
}  # fmt: skip
OWN = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8},
    "DeepseekV3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32,
        "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 8, "num_key_value_heads": 4,
    },
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 16},
}  # fmt: skip

name = sys.argv[2]
settings = {**COMMON, **OWN[name]}
if name == "DeepseekV3":
    del settings["output_router_logits"]
torch.manual_seed(0)
model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**settings)).to(
    DEVICE
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=False)
windows = Characters(text(sys.argv[1]), 40)
for batch in torch.utils.data.DataLoader(windows, batch_size=4):
    loss = model(**{key: value.to(DEVICE) for key, value in batch.items()}).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print("KEPT", loss.item(), flush=True)
