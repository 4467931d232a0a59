"""Trains GPT-2 (124M) or ResNet-50 on random data: the step times that `make bench-gpu` compares.

python bench/workloads/large_models.py gpt2 --steps 30 --timings times.json

Under torchrun each rank trains a model of its own, all the same: replicas without a word between them.
"""

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

Step = Callable[[], Tensor]


class Block(nn.Module):
    """Pre-norm attention and MLP, as in GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.second(x)), approximate="tanh"))


class Gpt2(nn.Module):
    """With its 50,257 tokens, 1,024 positions, 12 layers, 12 heads and width 768: 124,439,808 parameters."""

    def __init__(self, vocabulary: int, positions: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return functional.linear(self.norm(self.blocks(x)), self.tokens.weight)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a shortcut; the stride is in the 3x3 (ResNet v1.5)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            *self._convolution(channels, width, 1, 1), nn.ReLU(inplace=True),
            *self._convolution(width, width, 3, stride), nn.ReLU(inplace=True),
            *self._convolution(width, out, 1, 1),
        )  # fmt: skip
        same = stride == 1 and channels == out
        self.shortcut = nn.Sequential(*([] if same else self._convolution(channels, out, 1, stride)))

    @staticmethod
    def _convolution(channels: int, out: int, kernel: int, stride: int) -> list[nn.Module]:
        convolution = nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, bias=False)
        return [convolution, nn.BatchNorm2d(out)]

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def resnet(blocks: tuple[int, ...], width: int, classes: int) -> nn.Sequential:
    """ResNet-50 is (3, 4, 6, 3), 64, 1000: 25,557,032 parameters."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, padding=1),
    ]  # fmt: skip
    channels = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            layers.append(Bottleneck(channels, width << stage, 2 if stage > 0 and block == 0 else 1))
            channels = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def gpt2_step(device: str, batch: int, tiny: bool) -> Step:
    """A training step, its loss as the result, on one batch drawn on the host: the same for every device."""
    shape = (97, 16, 2, 2, 32) if tiny else (50257, 1024, 12, 12, 768)
    model = Gpt2(*shape).to(device)
    ids = torch.randint(shape[0], (batch, shape[1] + 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def resnet50_step(device: str, batch: int, tiny: bool) -> Step:
    """See `gpt2_step`."""
    model = (resnet((1, 1), 8, 10) if tiny else resnet((3, 4, 6, 3), 64, 1000)).to(device)
    images = torch.randn(batch, 3, *((32, 32) if tiny else (224, 224))).to(device)
    labels = torch.randint(10, (batch,)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


MODELS: dict[str, Callable[[str, int, bool], Step]] = {"gpt2": gpt2_step, "resnet50": resnet50_step}


def _of_rank(path: Path, rank: int) -> Path:
    return path if rank == 0 else path.with_name(f"{path.name}.rank{rank}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="a model of the same kind for a quick look")
    parser.add_argument("--precision", choices=["fp32", "tf32", "bf16"], default="fp32")
    parser.add_argument("--deterministic", action="store_true", help="torch.use_deterministic_algorithms")
    parser.add_argument("--losses", type=Path, help="where the bits of every loss go")
    parser.add_argument("--timings", type=Path, help="where the seconds of every step go, as JSON")
    asked = parser.parse_args()
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if asked.device == "cuda":
        torch.cuda.set_device(rank)
        torch.set_float32_matmul_precision("high" if asked.precision == "tf32" else "highest")
    mixed = (
        torch.autocast(asked.device, torch.bfloat16)
        if asked.precision == "bf16"
        else contextlib.nullcontext()
    )
    torch.use_deterministic_algorithms(asked.deterministic)
    torch.manual_seed(20)
    step = MODELS[asked.model](asked.device, asked.batch, asked.tiny)
    losses, seconds = [], []
    for number in range(asked.steps):
        begin = time.perf_counter()
        with mixed:
            loss = step().item()  # waits for the device
        seconds.append(time.perf_counter() - begin)
        losses.append(float(loss).hex())
        print(f"step {number} loss {loss:.4f}", flush=True)
    if asked.losses:
        _of_rank(asked.losses, rank).write_text("\n".join(losses))
    if asked.timings:
        _of_rank(asked.timings, rank).write_text(json.dumps(seconds))


if __name__ == "__main__":
    main()
