"""The three small models of the sweep: what a script does with them, and what it looks at afterwards.

    torchrun --nproc-per-node 2 sweep/sweep_models.py --model gan --steps 30 --losses OUT

Each step looks at values that only this rank has (a loss after the optimizer's step, a metric), because
those are what a recovery loses most easily. At the end digests of all parameters, buffers and generators
are written beside the losses.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH = 4
Step = Callable[[], list[torch.Tensor]]
"""One iteration; answers the values of it that the script looks at."""


class Setting:
    """Where to train, and random numbers that differ from rank to rank and come from the host."""

    def __init__(self, device: torch.device, rank: int, world: int) -> None:
        self.device = device
        self.world = world
        self.random = torch.Generator().manual_seed(100 + rank)

    def data_parallel(self, model: nn.Module) -> nn.Module:
        model = model.to(self.device)
        if self.world == 1:
            return model
        return DistributedDataParallel(
            model, device_ids=[self.device.index] if self.device.type == "cuda" else None
        )

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).to(self.device, non_blocking=True)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=self.random).to(self.device, non_blocking=True)


class CharGPT(nn.Module):
    """A character-level GPT with dropout."""

    def __init__(self, vocabulary: int = 32, width: int = 32, layers: int = 2, length: int = 16) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        block = nn.TransformerEncoderLayer(
            width, 2, 2 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.token(tokens) + self.position(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        return self.head(self.blocks(x, mask=mask, is_causal=True))


def gpt(setting: Setting) -> tuple[nn.Module, Step]:
    model = setting.data_parallel(CharGPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> list[torch.Tensor]:
        text = setting.integers(32, BATCH, 17)
        logits = model(text[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return [loss, (logits.argmax(-1) == text[:, 1:]).sum().float()]

    return model, step


def convnet(setting: Setting) -> tuple[nn.Module, Step]:
    """With BatchNorm, whose running statistics are each rank's own."""
    model = setting.data_parallel(
        nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, 10),
        )
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    correct = torch.zeros((), dtype=torch.long, device=setting.device)

    def step() -> list[torch.Tensor]:
        logits = model(setting.normal(BATCH, 1, 12, 12))
        labels = setting.integers(10, BATCH)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        correct.add_((logits.argmax(1) == labels).sum())
        return [loss, correct.float()]

    return model, step


def gan(setting: Setting) -> tuple[nn.Module, Step]:
    """Two optimizers, each with gradient accumulation."""
    generator = setting.data_parallel(
        nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 16), nn.Tanh())
    )
    critic = setting.data_parallel(
        nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(32, 1))
    )
    both = {
        "generator": torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9)),
        "critic": torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9)),
    }
    ones, zeros = torch.ones(BATCH, 1, device=setting.device), torch.zeros(BATCH, 1, device=setting.device)

    def noise() -> torch.Tensor:
        return torch.randn(BATCH, 8, device=setting.device)  # from the device's own generator

    def step() -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        for _ in range(2):
            with torch.no_grad():
                fake = generator(noise())
            verdict = critic(torch.cat([setting.normal(BATCH, 16).tanh(), fake]))
            loss = F.binary_cross_entropy_with_logits(verdict, torch.cat([ones, zeros]))
            (loss / 2).backward()
            seen.append(loss)
        both["critic"].step()
        both["critic"].zero_grad()
        for _ in range(2):
            loss = F.binary_cross_entropy_with_logits(critic(generator(noise())), ones)
            (loss / 2).backward()
            seen.append(loss)
        both["generator"].step()
        both["generator"].zero_grad()
        both["critic"].zero_grad()
        return seen

    return nn.ModuleList([generator, critic]), step


MODELS: dict[str, Callable[[Setting], tuple[nn.Module, Step]]] = {"gpt": gpt, "convnet": convnet, "gan": gan}
COMMITS = {"gpt": 1, "convnet": 1, "gan": 2}
"""Optimizer steps, hence minibatches of the log, in one iteration."""


def digest(tensor: torch.Tensor) -> str:
    """Of its bits."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def final_state(model: nn.Module, device: torch.device) -> dict[str, str]:
    """Digests of everything that training changed."""
    state = {name: digest(value.reshape(-1)) for name, value in model.state_dict().items()}
    state["host generator"] = digest(torch.get_rng_state())
    if device.type == "cuda":
        state["device generator"] = digest(torch.cuda.get_rng_state(device))
    return state


def per_rank(path: Path, rank: int) -> Path:
    """The file of a rank."""
    return path if rank == 0 else path.with_name(f"{path.name}.rank{rank}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=int, default=20, help="iterations")
    parser.add_argument("--losses", type=Path, required=True, help="values of each step, as hexadecimal bits")
    parser.add_argument("--timings", type=Path, help="seconds of each step, as JSON")
    arguments = parser.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", rank) if arguments.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(7)
    setting = Setting(device, rank, world)
    model, step = MODELS[arguments.model](setting)
    torch.manual_seed(8 + rank)  # dropout differs from rank to rank
    lines: list[str] = []
    seconds: list[float] = []
    for number in range(arguments.steps):
        begin = time.perf_counter()
        values = [value.item() for value in step()]
        seconds.append(time.perf_counter() - begin)
        lines.append(" ".join(struct.pack(">f", value).hex() for value in values))
        if rank == 0 and (number + 1) % 10 == 0:
            print(f"step {number + 1}  {values[0]:.4f}", flush=True)
    per_rank(arguments.losses, rank).write_text("\n".join(lines) + "\n")
    state = per_rank(arguments.losses.with_name("state.json"), rank)
    state.write_text(json.dumps(final_state(model, device), indent=1))
    if arguments.timings:
        per_rank(arguments.timings, rank).write_text(json.dumps(seconds))
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
