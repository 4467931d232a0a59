"""What odd programs share: they run natively (CPU, Gloo) and on the device, and write down all they see.

`PROGRAM.py FOLDER`: rank R's lines lie in FOLDER/R.
"""

from __future__ import annotations

import os
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

rank = int(os.environ.get("RANK", "0"))
world = int(os.environ.get("WORLD_SIZE", "1"))
on_device = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_device else torch.device("cpu")
_lines = (Path(sys.argv[1]) / str(rank)).open("w", encoding="utf-8")


def begin() -> None:
    """Sets the device, and joins the other ranks."""
    if on_device:
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if on_device else "gloo")
    torch.manual_seed(rank)


def bits(tensor: torch.Tensor) -> str:
    content = tensor.detach().cpu().contiguous().clone()  # a storage that numpy has seen is of a fixed size
    digest = zlib.crc32(content.reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"{str(content.dtype).removeprefix('torch.')}{list(content.shape)} {digest:08x}"


def say(*what: Any) -> None:
    """One line; tensors by their bits."""
    words = [bits(item) if isinstance(item, torch.Tensor) else str(item) for item in what]
    _lines.write(" ".join(words) + "\n")
    _lines.flush()
