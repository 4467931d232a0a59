"""pytorch/examples distributed/tensor_parallelism: `tensor`, `sequence` (two ranks) and `fsdp_tp` (four ranks, a Llama)."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

KIND = sys.argv[1]
device_type = "cuda" if torch.cuda.is_available() else "cpu"
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if device_type == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


class ToyModel(nn.Module):
    """MLP of the example."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.relu, self.out_proj = nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 5)

    def forward(self, x):
        return self.out_proj(self.relu(self.in_proj(x)))


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            w(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).contiguous().view(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim), nn.Linear(dim, 2 * dim)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention, self.feed_forward = Attention(dim, heads), FeedForward(dim)

    def forward(self, x):
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    def __init__(self, vocabulary: int = 64, dim: int = 32, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.output = nn.RMSNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))


def toy():
    mesh = init_device_mesh(device_type, (world,))
    model = ToyModel().to(device_type)
    if KIND == "tensor":
        plan = {"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()}
    else:
        plan = {
            "in_proj": ColwiseParallel(input_layouts=Shard(0)),
            "out_proj": RowwiseParallel(output_layouts=Shard(0)),
        }
    model = parallelize_module(model, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, foreach=True)
    for step in range(10):
        torch.manual_seed(step if KIND == "tensor" else step + 100 * rank)
        yield model(torch.rand(20, 10, device=device_type)).sum(), optimizer


def llama():
    mesh = init_device_mesh(device_type, (world // 2, 2), mesh_dim_names=("dp", "tp"))
    model = Llama().to(device_type)
    tp = mesh["tp"]
    parallelize_module(
        model, tp,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )  # fmt: skip
    for block in model.layers:
        parallelize_module(
            block, tp,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "attention.wq": ColwiseParallel(use_local_output=False),
                "attention.wk": ColwiseParallel(use_local_output=False),
                "attention.wv": ColwiseParallel(use_local_output=False),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward.w3": ColwiseParallel(),
            },
        )  # fmt: skip
    model = fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True)
    for step in range(8):
        torch.manual_seed(step + rank // 2)
        tokens = torch.randint(64, (2, 16), device=device_type)
        yield model(tokens).sum(), optimizer


torch.manual_seed(0)
for loss, optimizer in llama() if KIND == "fsdp_tp" else toy():
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("KEPT", rank, loss.item(), flush=True)
dist.destroy_process_group()
