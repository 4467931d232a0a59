"""What a third-party training leaves for its test to compare: one line per value, every bit of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch


def write(file: Path, losses: Iterable[float | torch.Tensor], model: torch.nn.Module) -> None:
    """Losses in hexadecimal, then a digest per parameter and buffer."""
    lines = [f"loss {float(loss).hex()}" for loss in losses]
    for name, tensor in model.state_dict().items():
        content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        lines.append(f"{name} {hashlib.sha256(bytes(content.tolist())).hexdigest()}")
    file.write_text("\n".join(lines) + "\n")
