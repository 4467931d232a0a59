"""pytorch/examples distributed/minGPT-ddp: its model around nn.MultiheadAttention, its trainer, `use_amp: True`, snapshots."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from shared import text
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

OUT = Path(sys.argv[2])
BLOCK = 32


class CharDataset(Dataset):
    def __init__(self, data: str) -> None:
        letters = sorted(set(data))
        self.vocabulary = len(letters)
        number = {letter: index for index, letter in enumerate(letters)}
        self.tokens = torch.tensor([number[letter] for letter in data])

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int):
        chunk = self.tokens[index * BLOCK : (index + 1) * BLOCK + 1]
        return chunk[:-1], chunk[1:]


class MultiheadAttentionLayer(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.c_proj = nn.Linear(dim, dim)
        self.register_buffer("mask", torch.tril(torch.ones(BLOCK, BLOCK)) == 0)
        self.attn = nn.MultiheadAttention(dim, heads, dropout=0.1, batch_first=True)

    def forward(self, x):
        length = x.size(1)
        y = self.attn(x, x, x, attn_mask=self.mask[:length, :length])[0]
        return nn.functional.dropout(self.c_proj(y), 0.1, self.training)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = MultiheadAttentionLayer(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(0.1))

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.tok_emb, self.pos_emb = nn.Embedding(vocabulary, dim), nn.Parameter(torch.zeros(1, BLOCK, dim))
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(2))
        self.ln_f, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens, targets):
        x = self.drop(self.tok_emb(tokens) + self.pos_emb[:, : tokens.size(1)])
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


device = "cuda" if torch.cuda.is_available() else "cpu"
local_rank = int(os.environ["LOCAL_RANK"])
if device == "cuda":
    torch.cuda.set_device(local_rank)
dist.init_process_group("nccl" if device == "cuda" else "gloo")
torch.manual_seed(0)
data = CharDataset(text(sys.argv[1])[:4000])
model = DistributedDataParallel(
    GPT(data.vocabulary).to(device), device_ids=[local_rank] if device == "cuda" else None
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
scaler = torch.amp.GradScaler(device)
loader = DataLoader(
    data, batch_size=4, pin_memory=True, shuffle=False, num_workers=2, sampler=DistributedSampler(data)
)
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for source, targets in loader:
        source, targets = source.to(device), targets.to(device)
        with torch.amp.autocast(device_type=device, dtype=torch.float16):
            _, loss = model(source, targets)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    if dist.get_rank() == 0:
        torch.save(
            {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch},
            OUT / "snapshot.pt",
        )
    print("KEPT", dist.get_rank(), epoch, loss.item(), flush=True)
dist.destroy_process_group()
