"""A scenario: what a real script does for a few steps, on "cuda" (under the proxy) or on "cpu" (natively).

Whatever it keeps is compared bit for bit between the runs. Random numbers are drawn from the generator that
`Run.seed` sets just before: natively that is also the host's, under the proxy it is the device's alone.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass
class Run:
    """One scenario being run."""

    device: str
    folder: Path
    kept: list[tuple[str, str]] = field(default_factory=list)

    @property
    def on_cuda(self) -> bool:
        return self.device == "cuda"

    def seed(self, number: int) -> None:
        torch.manual_seed(number)

    def keep(self, name: str, value: Any) -> None:
        """Notes `value` under `name`: tensors with type, shape and bytes, floats with their bits."""
        self.kept.append((name, _bits(value)))

    def keep_model(self, model: torch.nn.Module) -> None:
        for name, tensor in model.state_dict().items():
            self.keep(name, tensor)

    def data(self, *shape: int, seed: int = 7) -> torch.Tensor:
        """Normal numbers, drawn on the host and sent to the device."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=generator).to(self.device)

    def labels(self, count: int, classes: int, seed: int = 11) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(classes, (count,), generator=generator).to(self.device)


def _bits(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        host = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        content = host.reshape(-1).view(torch.uint8) if host.numel() else torch.empty(0, dtype=torch.uint8)
        digest = hashlib.sha256(content.numpy().tobytes()).hexdigest()[:24]
        few = host.reshape(-1)[:3].tolist()
        return f"{host.dtype} {tuple(host.shape)} {digest} {few}"
    if isinstance(value, float):
        return f"float {struct.pack('<d', value).hex()} {value}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_bits(item) for item in value) + "]"
    return f"{type(value).__name__} {value}"


Body = Callable[[Run], None]
GROUPS: dict[str, dict[str, Body]] = {}
"""Group -> name -> scenario, in the order of definition. The scenarios of a group share a process."""


def scenario(group: str) -> Callable[[Body], Body]:
    """Adds a function to a group; its name says what is done."""

    def add(body: Body) -> Body:
        GROUPS.setdefault(group, {})[body.__name__] = body
        return body

    return add


def small_model(run: Run, *, dropout: float = 0.0, width: int = 16) -> torch.nn.Module:
    """A perceptron with normalisation, made from seed 0."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(8, width),
        torch.nn.LayerNorm(width),
        torch.nn.GELU(),
        torch.nn.Dropout(dropout),
        torch.nn.Linear(width, 4),
    ).to(run.device)


def step(run: Run, loss: torch.Tensor, optimizer: torch.optim.Optimizer, *, keep: bool = True) -> None:
    """Backward, step, zero: one minibatch."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if keep:
        run.keep("loss", loss)
