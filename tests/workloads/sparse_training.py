"""Trains sparse embeddings, on several ranks with DDP; writes what each rank got to `--out`.rank."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cuda")
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=8)
args = parser.parse_args()

rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if args.device == "cuda":
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
device = torch.device(args.device)
if size > 1:
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")


class Words(nn.Module):
    """Two tables of word vectors and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(40, 6, sparse=True)
        self.second = nn.EmbeddingBag(40, 6, sparse=True, mode="sum")
        self.head = nn.Linear(6, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.first(words).mean(1) + self.second(words))


torch.manual_seed(1)
model = Words().to(device)
trained: nn.Module = nn.parallel.DistributedDataParallel(model) if size > 1 else model
tables = [model.first.weight, model.second.weight]
optimizers = [
    torch.optim.SparseAdam(tables, lr=0.02),
    torch.optim.SGD(model.head.parameters(), lr=0.05, momentum=0.9),
]
results: list[torch.Tensor] = []
generator = torch.Generator().manual_seed(7 + rank)
for step in range(args.steps):
    words = torch.randint(0, 40, (8, 3 + (step + rank) % 4), generator=generator).to(device)
    loss = trained(words).square().mean()
    loss.backward()
    if not all(table.grad is not None and table.grad.is_sparse for table in tables):
        raise SystemExit("the gradients of the tables are not sparse")
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    results.append(loss.detach().cpu())
results += [parameter.detach().cpu() for parameter in model.parameters()]
content = b"".join(t.contiguous().flatten().view(torch.uint8).numpy().tobytes() for t in results)
args.out.with_suffix(f".{rank}").write_bytes(content)
if size > 1:
    dist.barrier()  # no rank leaves while another still talks to it
    dist.destroy_process_group()
