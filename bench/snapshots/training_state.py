"""A state to save: parameters of a transformer, AdamW's moments and steps, and a generator's state."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import chain

import torch

State = dict[str, torch.Tensor]

LAYERS = 12
SHARE_OF_LAYERS = 0.8  # of the parameters; the rest is one embedding, the largest tensor by far


def training_state(count: int, seed: int = 0) -> State:
    """About `count` bytes of float32 in 589 tensors: most bytes in a few, most tensors small."""
    generator = torch.Generator().manual_seed(seed)
    parameters = count // (3 * 4)
    width = max(16, round(math.sqrt(SHARE_OF_LAYERS * parameters / (12 * LAYERS)) / 16) * 16)
    layers = list(_layers(width))
    rest = parameters - sum(math.prod(shape) for _, shape in layers)
    shapes = [("embedding", (max(1, rest // width), width)), *layers]
    state: State = {}
    for kind in ("parameter", "exp_avg", "exp_avg_sq"):
        for name, shape in shapes:
            state[f"{kind}.{name}"] = torch.randn(shape, generator=generator)
    for name, _ in shapes:
        state[f"step.{name}"] = torch.tensor(float(seed + 1))
    state["generator"] = generator.get_state()
    return state


def _layers(width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    matrices = {"qkv": (3, 1), "projection": (1, 1), "up": (4, 1), "down": (1, 4)}
    for layer in range(LAYERS):
        for name, (rows, columns) in matrices.items():
            yield f"{layer}.{name}.weight", (rows * width, columns * width)
            yield f"{layer}.{name}.bias", (rows * width,)
        for name in ("norm_1", "norm_2"):
            yield f"{layer}.{name}.weight", (width,)
            yield f"{layer}.{name}.bias", (width,)
    yield "norm.weight", (width,)
    yield "norm.bias", (width,)


def bytes_of(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Its bytes, in place."""
    return memoryview(tensor.reshape(-1).numpy()).cast("B")


def description_of(state: State) -> bytes:
    """What a file needs beside the bytes, so that they become tensors again."""
    rows = [(name, str(tensor.dtype).removeprefix("torch."), tensor.shape) for name, tensor in state.items()]
    return json.dumps(rows).encode()


def empty_state(description: bytes) -> State:
    rows = json.loads(description)
    return {name: torch.zeros(shape, dtype=getattr(torch, kind)) for name, kind, shape in rows}


def same(one: State, other: State) -> bool:
    """Bit for bit, with equal names in equal order."""
    pairs = zip(one.items(), other.items(), strict=False)
    return len(one) == len(other) and all(
        a == b and x.dtype == y.dtype and x.shape == y.shape and memory_of(x) == memory_of(y)
        for (a, x), (b, y) in pairs
    )


def offsets_of(state: State, first: int, alignment: int = 64) -> list[int]:
    """Where each tensor begins, laid one behind the other; the last number is the end."""
    offsets, end = [], first
    for tensor in state.values():
        offsets.append(end)
        end += -(-tensor.nbytes // alignment) * alignment
    return list(chain(offsets, [end]))
