"""Runs a program as `python` does, and writes down what its training led to: `python watch.py FILE|-m MODULE …`

The program is not changed, and nothing of it is known here: PyTorch tells of each optimizer's step.  When the
program ends, parameters and state of all optimizers that stepped become one digest, in the file
`$GUEST_RESULTS/RANK.json`.  A program whose optimizer is none of torch.optim's names what it trained by
`torch.nn.Module.guest_result = True` on the module, or prints lines that begin with KEPT.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

RESULTS = "GUEST_RESULTS"
MISSING_OPERATORS = ("nms", "qnms")
"""torchvision's wheel is a CUDA build, whose library does not load beside this PyTorch; its Python part demands
that they be known."""


class Kept:
    """Standard output, and the lines on it that begin with KEPT: pieces of several ranks' lines mix in a pipe."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._text = stream, ""

    def write(self, text: str) -> int:
        self._text += text
        return int(self._stream.write(text))

    def lines(self) -> list[str]:
        return [line for line in self._text.splitlines() if line.startswith("KEPT")]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Watch:
    """Of this process."""

    def __init__(self) -> None:
        self.steps = 0
        self._output = sys.stdout = Kept(sys.stdout)
        self._optimizers: list[torch.optim.Optimizer] = []

    def stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """One that takes part in an optimizer of several is told of, too."""
        self.steps += 1
        if not any(known is optimizer for known in self._optimizers):
            self._optimizers.append(optimizer)

    def result(self) -> dict[str, Any]:
        digest, tensors = hashlib.sha256(), 0
        for tensor in self._trained():
            digest.update(bits(tensor))
            tensors += 1
        kept = self._output.lines()
        return {"steps": self.steps, "tensors": tensors, "digest": digest.hexdigest(), "kept": kept}

    def _trained(self) -> Iterator[torch.Tensor]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield parameter
                    state = optimizer.state.get(parameter, {})
                    yield from (value for _, value in sorted(state.items()) if torch.is_tensor(value))
        for module in (one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)):
            if vars(module).get("guest_result"):
                yield from module.state_dict().values()


def bits(tensor: torch.Tensor) -> bytes:
    """Of this rank's part."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def main() -> None:
    for name in MISSING_OPERATORS:
        torch.library.define(
            f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
    watch = Watch()
    register_optimizer_step_post_hook(watch.stepped)
    del sys.argv[0]
    try:
        if sys.argv[0] == "-m":
            del sys.argv[0]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        folder = Path(os.environ[RESULTS])
        folder.joinpath(f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(watch.result()) + "\n")


if __name__ == "__main__":
    main()
