"""The frame of the scenarios here: what they share, and the notes each rank leaves about them.

A scenario is a function that trains for a few steps with one feature of torch.distributed. It hardly knows
whether it runs natively (`cpu`, Gloo) or under the proxy (`cuda`, "nccl").
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

Scenario = Callable[["Run"], None]
GROUPS: dict[str, dict[str, Scenario]] = {}


def scenario(group: str) -> Callable[[Scenario], Scenario]:
    """Registers a function as a scenario of `group`, all in one run of torchrun."""

    def register(function: Scenario) -> Scenario:
        GROUPS.setdefault(group, {})[function.__name__] = function
        return function

    return register


class Run:
    """One rank's run of a group: its device, a folder for files, and what its scenarios computed."""

    def __init__(self, device: str, rank: int, size: int, folder: Path) -> None:
        self.folder = folder
        self.device = torch.device(device, rank) if device == "cuda" else torch.device(device)
        self.rank = rank
        self.size = size
        self.notes: dict[str, dict[str, Any]] = {}
        self._current: dict[str, Any] = {}
        self._step = 1
        self._step_began = 0
        register_optimizer_step_post_hook(self._after_step)

    # ------------------------------------------------------------------ what scenarios build on
    @property
    def ddp(self) -> dict[str, Any]:
        """How scripts wrap for this device."""
        return {"device_ids": [self.device.index]} if self.device.type == "cuda" else {}

    def place(self, module: nn.Module) -> nn.Module:
        """The module on the device; parameters of all ranks are equal."""
        return module.to(self.device)

    def network(self, *sizes: int) -> nn.Module:
        """Linear layers with GELU between them, on the device."""
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.GELU()]
        return self.place(nn.Sequential(*layers[:-1]))

    def numbers(self, *shape: int) -> torch.Tensor:
        """Random numbers, other ones on each rank."""
        numbers = torch.randn(self.size, *shape)
        return numbers[self.rank].to(self.device)

    def common_numbers(self, *shape: int) -> torch.Tensor:
        """Random numbers, the same on each rank."""
        return torch.randn(*shape).to(self.device)

    # ------------------------------------------------------------------ what is written down
    def keep(self, *tensors: torch.Tensor) -> None:
        """The bits of these tensors are part of the scenario's outcome."""
        for tensor in tensors:
            content = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            data = content.reshape(-1).view(torch.uint8).numpy().tobytes()
            digest = hashlib.sha256(data).hexdigest()[:32]
            self._current["content"].append(f"{content.dtype} {list(content.shape)} {digest}")

    def keep_value(self, value: object) -> None:
        """Something else that must be the same in all runs."""
        self._current["content"].append(repr(value))

    def mark(self, phase: str) -> None:
        """Says what the calls from here on belong to; a drill is aimed at one of them."""
        self._current["marks"].append([phase, self._step, self._records() - self._step_began + 1])

    def train(
        self,
        model: Callable[..., torch.Tensor],
        optimizer: torch.optim.Optimizer,
        batches: Iterator[torch.Tensor] | list[torch.Tensor],
        *,
        before_step: Callable[[], None] = lambda: None,
    ) -> None:
        """The plain loop: the loss is the mean square of the output."""
        for inputs in batches:
            self.mark("forward")
            loss = model(inputs).square().mean()
            self.mark("backward")
            loss.backward()
            before_step()
            self.mark("optimizer")
            optimizer.step()
            self.mark("end")
            optimizer.zero_grad()
            self.keep(loss)

    def batches(self, count: int, *shape: int) -> list[torch.Tensor]:
        """Other ones on each rank."""
        return [self.numbers(*shape) for _ in range(count)]

    @contextmanager
    def _described(self, name: str) -> Iterator[None]:
        self._current = {"content": [], "marks": []}
        self.notes[name] = self._current
        yield

    def execute(self, name: str, function: Scenario) -> None:
        """Runs one scenario from a fresh seed."""
        print(f"[rank {self.rank}] {name}", flush=True)
        with self._described(name):
            torch.manual_seed(sum(name.encode()))
            function(self)
        dist.barrier()

    def write(self, path: Path) -> None:
        """Leaves the notes for the test."""
        path.write_text(json.dumps(self.notes))

    # ------------------------------------------------------------------ where in the log we are
    def _records(self) -> int:
        client = sys.modules.get("understudy.proxy_client._client")
        return int(client.statistics()["records"]) if client is not None else 0

    def _after_step(self, *_: object) -> None:
        if self._current:
            self.mark("commit")
        self._step += 1
        self._step_began = self._records()
