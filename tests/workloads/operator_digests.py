"""Runs PyTorch's operator database on a device and writes a digest of every result: one line per entry.

Run natively and under the proxy, on the same kind of device, the lines must be the same.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

SAMPLES = 4


def to_device(value: Any, device: str) -> Any:
    """A copy of all tensors in `value` on the device; those that need a gradient stay leaves."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().to(device).requires_grad_(leaf.requires_grad)

    return tree_map(move, value)


def contents(value: Any) -> Iterator[bytes]:
    """What can be compared: layout and bytes of tensors, other leaves as they are printed."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            plain = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous()
            yield repr((leaf.dtype, tuple(leaf.shape), leaf.stride())).encode()
            yield plain.flatten().view(torch.uint8).numpy().tobytes()
        elif not isinstance(leaf, torch.Tensor):
            yield repr(leaf).encode()


def digest(op: Any, device: str) -> str:
    """Of the forward and backward results of its first samples, or the name of what it raised."""
    seen = hashlib.sha256()
    random.seed(0)
    torch.manual_seed(0)
    try:
        samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd))[:SAMPLES]
    except Exception as error:  # noqa: BLE001 - the database's own trouble: the same everywhere
        return f"no samples: {type(error).__name__}"
    for sample in samples:
        torch.manual_seed(1)
        inputs = to_device((sample.input, sample.args, sample.kwargs), device)
        try:
            result = op(inputs[0], *inputs[1], **inputs[2])
            for part in contents(result):
                seen.update(part)
            wanted = [leaf for leaf in tree_leaves(inputs) if getattr(leaf, "requires_grad", False)]
            losses = [
                leaf.abs().sum() for leaf in tree_leaves(result) if getattr(leaf, "grad_fn", None) is not None
            ]
            if losses and wanted:
                for part in contents(torch.autograd.grad(sum(losses), wanted, allow_unused=True)):
                    seen.update(part)
        except Exception as error:  # noqa: BLE001 - what is raised is a result too
            seen.update(type(error).__name__.encode())
    return seen.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1, help="one entry in so many")
    asked = parser.parse_args()
    torch.use_deterministic_algorithms(True, warn_only=True)
    kind = torch.device(asked.device).type
    found = {
        op.formatted_name: digest(op, asked.device)
        for op in op_db[:: asked.every]
        if torch.float32 in op.supported_dtypes(kind) and torch.float32 in op.supported_dtypes("cpu")
    }
    asked.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
