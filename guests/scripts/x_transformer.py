"""x-transformers after its README: an autoregressive wrapper, trained, then asked to generate."""

import sys

import torch
from shared import DEVICE, Characters, text
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

torch.manual_seed(0)
network = TransformerWrapper(
    num_tokens=256, max_seq_len=64,
    attn_layers=Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, rotary_pos_emb=True, attn_flash=True),
)  # fmt: skip
model = AutoregressiveWrapper(network).to(DEVICE)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for batch in torch.utils.data.DataLoader(Characters(text(sys.argv[1]), 40), batch_size=4):
    loss = model(batch["input_ids"].to(DEVICE))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    print("KEPT", loss.item(), flush=True)
torch.manual_seed(5)
print(
    "KEPT", model.eval().generate(torch.zeros(1, 1, dtype=torch.long, device=DEVICE), 24).tolist(), flush=True
)
