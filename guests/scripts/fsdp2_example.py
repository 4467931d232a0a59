"""pytorch/examples distributed/FSDP2: a Transformer made on the meta device, sharded, initialised there, trained, saved.

`--mixed-precision` and `--explicit-prefetching` are the example's own switches; so is the checkpoint by DCP.
"""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


@dataclass
class ModelArgs:
    n_layers: int = 3
    vocab_size: int = 64
    max_seq_len: int = 16
    dim: int = 32
    n_heads: int = 4
    dropout_p: float = 0.1


class Attention(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.n_heads, self.dropout_p = args.n_heads, args.dropout_p
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(args.dim, args.dim, bias=False) for _ in range(4))
        self.resid_dropout = nn.Dropout(args.dropout_p)

    def forward(self, x):
        batch, length, _ = x.size()
        q, k, v = (
            w(x).view(batch, length, self.n_heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, None, self.dropout_p if self.training else 0
        )
        return self.resid_dropout(self.wo(out.transpose(1, 2).reshape(batch, length, -1)))

    def reset_parameters(self):
        for layer in (self.wq, self.wk, self.wv, self.wo):
            layer.reset_parameters()


class Block(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(args.dim), nn.LayerNorm(args.dim)
        self.attention = Attention(args)
        self.w1, self.w2 = nn.Linear(args.dim, 4 * args.dim), nn.Linear(4 * args.dim, args.dim)
        self.dropout = nn.Dropout(args.dropout_p)

    def forward(self, x):
        h = x + self.attention(self.attention_norm(x))
        return h + self.dropout(self.w2(nn.functional.gelu(self.w1(self.ffn_norm(h)))))


class Transformer(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.max_seq_len = args.max_seq_len
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.pos_embeddings = nn.Embedding(args.max_seq_len, args.dim)
        self.dropout = nn.Dropout(args.dropout_p)
        self.layers = nn.ModuleList(Block(args) for _ in range(args.n_layers))
        self.norm = nn.LayerNorm(args.dim)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens) + self.pos_embeddings(
            torch.arange(tokens.size(1), device=tokens.device)
        )
        h = self.dropout(h)
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h)).float()

    def reset_parameters(self):
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()


parser = argparse.ArgumentParser()
parser.add_argument("--mixed-precision", action="store_true")
parser.add_argument("--explicit-prefetching", action="store_true")
parser.add_argument("--out", type=Path, required=True)
options = parser.parse_args()

device_type = torch.accelerator.current_accelerator() or torch.device("cpu")
rank = int(os.environ["LOCAL_RANK"])
device = torch.device(f"{device_type.type}:{rank}") if device_type.type != "cpu" else device_type
if device.type != "cpu":
    torch.accelerator.device_index(rank)
    torch.accelerator.set_device_index(rank)
dist.init_process_group(
    backend=torch.distributed.get_default_backend_for_device(device),
    device_id=device if device.type != "cpu" else None,
)

torch.manual_seed(0)
arguments = ModelArgs()
with torch.device("meta"):
    model = Transformer(arguments)
more = {}
if options.mixed_precision:
    more["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.layers:
    fully_shard(layer, **more)
fully_shard(model, **more)
assert isinstance(model, FSDPModule)
if options.explicit_prefetching:
    for number, layer in enumerate(model.layers):
        layer.set_modules_to_forward_prefetch(list(model.layers[number + 1 : number + 3]))
        layer.set_modules_to_backward_prefetch(list(model.layers[max(number - 2, 0) : number][::-1]))
model.to_empty(device=device)
model.reset_parameters()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(10):
    if options.explicit_prefetching:
        model.unshard()
    x = torch.randint(0, arguments.vocab_size, (4, arguments.max_seq_len), device=device)
    loss = model(x).sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    print("KEPT", rank, loss.item(), flush=True)
state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if rank == 0:
    torch.save(state, options.out / "model.pt")
dist.destroy_process_group()
