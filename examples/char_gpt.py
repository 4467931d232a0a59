"""Train a small character-level GPT, on one device or on several with DistributedDataParallel.

    python examples/char_gpt.py --device cpu
    torchrun --nproc-per-node 2 examples/char_gpt.py

The text is the source code of Python's own standard library; `--data FILE` takes any other text.
`--resume DIR` goes on behind the step of a checkpoint: model.pt, optimizer.pt, and snapshot.json, which has
the step. With `--dropout 0` the losses are then those of a run that never stopped.
"""

import argparse
import json
import math
import os
import struct
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    """Attention and a two-layer perceptron, each on a residual branch."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class CharGPT(nn.Module):
    def __init__(self, vocabulary: int, block_size: int, layers: int, heads: int, width: int, dropout: float):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(block_size, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(self.initialise)

    @staticmethod
    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.token(tokens) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_text(path: Path | None, limit: int = 1_000_000) -> str:
    """The text to learn: a file, or the first modules of the standard library by name. ASCII only."""
    if path is not None:
        text = path.read_text(errors="replace")
    else:
        modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
        text = "\n".join(module.read_text(errors="replace") for module in modules)
    return text.encode("ascii", errors="ignore").decode()[:limit]


class Batches:
    """Random windows of the text. The next batch is on its way to the device while one is in use.

    `skip`: leaves out so many batches at the beginning.
    """

    def __init__(
        self,
        tokens: torch.Tensor,
        batch_size: int,
        block_size: int,
        seed: int,
        device: torch.device,
        skip: int = 0,
    ):
        self.tokens = tokens
        self.batch_size = batch_size
        self.window = torch.arange(block_size + 1)
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device
        for _ in range(skip):
            self.starts()
        self.upcoming = self.load()

    def starts(self) -> torch.Tensor:
        last = len(self.tokens) - len(self.window)
        return torch.randint(last, (self.batch_size, 1), generator=self.generator)

    def load(self) -> torch.Tensor:
        windows = self.tokens[self.starts() + self.window]
        if self.device.type == "cuda":
            windows = windows.pin_memory()
        return windows.to(self.device, non_blocking=True)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        batch, self.upcoming = self.upcoming, self.load()
        return batch[:, :-1], batch[:, 1:]


def parameter_groups(model: nn.Module, decay: float) -> list[dict]:
    """Weight decay for matrices, none for biases and gains."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


def hexadecimal(loss: float) -> str:
    """The 32-bit pattern of a loss, so that two runs can be compared bit for bit."""
    return struct.pack(">f", loss).hex()


def per_rank(path: Path, rank: int) -> Path:
    return path if rank == 0 else path.with_name(f"{path.name}.rank{rank}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--data", type=Path, help="a text file (default: Python's standard library)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8, help="per rank")
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--resume", type=Path, help="a checkpoint's directory: model.pt, optimizer.pt, …")
    parser.add_argument("--losses", type=Path, help="write each step's loss, as hexadecimal bits")
    parser.add_argument("--timings", type=Path, help="write each step's seconds, as JSON")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))

    if args.device == "cuda":
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
    else:
        device = torch.device("cpu")
    if world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    text = read_text(args.data)
    alphabet = sorted(set(text))
    index = {character: i for i, character in enumerate(alphabet)}
    tokens = torch.tensor([index[character] for character in text])

    torch.manual_seed(args.seed)
    model = CharGPT(len(alphabet), args.block_size, args.layers, args.heads, args.width, args.dropout)
    first = 0
    if args.resume:
        model.load_state_dict(torch.load(args.resume / "model.pt"))
        first = json.loads((args.resume / "snapshot.json").read_text())["step"]
    model.to(device)
    torch.manual_seed(args.seed + 1 + rank)  # from here on, dropout differs between ranks
    train_model: nn.Module = model
    if world_size > 1:
        train_model = DistributedDataParallel(
            model, device_ids=[local_rank] if device.type == "cuda" else None
        )

    optimizer = torch.optim.AdamW(parameter_groups(model, decay=0.1), lr=args.lr, betas=(0.9, 0.95))
    if args.resume:
        optimizer.load_state_dict(torch.load(args.resume / "optimizer.pt"))
    warmup = max(1, args.steps // 20)

    def rate(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, args.steps - warmup)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

    # The rate depends on the step alone, so the schedule need not be loaded.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate, last_epoch=first - 1)
    batches = Batches(tokens, args.batch_size, args.block_size, args.seed * 1000 + rank, device, skip=first)

    if rank == 0:
        count = sum(p.numel() for p in model.parameters())
        print(f"{count / 1e6:.2f} M parameters, {len(text):,} characters, {world_size} x {device.type}")
        if args.resume:
            print(f"goes on behind step {first} of {args.resume}")

    losses: list[float] = []
    seconds: list[float] = []
    average = torch.zeros((), device=device)
    for step in range(first, args.steps):
        begin = time.perf_counter()
        inputs, targets = batches.next()
        loss = train_model(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)

        average.lerp_(loss.detach(), 1.0 if step == first else 0.05)
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
        if rank == 0 and (step + 1) % args.log_every == 0:
            recent = seconds[-args.log_every :]
            print(
                f"step {step + 1:5d}  loss {losses[-1]:.4f}  average {average.item():.4f}  "
                f"{1000 * sum(recent) / len(recent):.1f} ms/step",
                flush=True,
            )

    if args.losses:
        per_rank(args.losses, rank).write_text("".join(f"{hexadecimal(loss)}\n" for loss in losses))
    if args.timings:
        per_rank(args.timings, rank).write_text(json.dumps(seconds))
    if world_size > 1:
        # No rank leaves while another still talks to it.
        dist.barrier(device_ids=[local_rank] if device.type == "cuda" else None)
        del train_model  # PyTorch 2.13 may hang where it is what frees the process group at last
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
