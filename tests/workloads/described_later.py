"""Modules that are made, copied, unpickled and dropped after a first description are right in the next."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any, Self

import torch
from torch import nn

from understudy.proxy_client import state_names


class Own(nn.Module):
    """Made in a way of its own, which nobody can watch."""

    def __new__(cls) -> Self:
        return object.__new__(cls)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, device="cuda"))


class Base:
    """Takes what its subclasses are made with."""

    def __new__(cls, size: int) -> Self:
        made = super().__new__(cls)
        made.size = size  # type: ignore[attr-defined]
        return made


class Mixed(nn.Linear, Base):
    """Has somebody else's `__new__` behind Module."""

    def __init__(self, size: int) -> None:
        nn.Linear.__init__(self, size, size)


def classes() -> list[str]:
    return [module["class"] for module in state_names.describe()["modules"]]


def stepped(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def main() -> None:
    first = nn.Sequential(nn.Linear(2, 2)).cuda()
    kept = [stepped(first.parameters())]
    assert classes() == ["Sequential"]

    looks = 0
    look = gc.get_objects

    def counted(*arguments: Any) -> list[Any]:
        nonlocal looks
        looks += 1
        return look(*arguments)

    gc.get_objects = counted  # type: ignore[assignment]
    second = nn.Bilinear(2, 2, 2).cuda()
    copied = copy.deepcopy(first)
    unpickled = pickle.loads(pickle.dumps(nn.Linear(3, 3))).cuda()
    mixed = Mixed(3).cuda()
    assert mixed.size == 3  # type: ignore[comparison-overlap]
    assert classes() == ["Sequential", "Bilinear", "Sequential", "Linear", "Mixed"]
    del copied, unpickled, mixed
    gc.collect()
    kept.append(stepped(second.parameters()))
    assert classes() == ["Sequential", "Bilinear"]
    assert looks == 0, "it looked at every object again"

    own = Own()
    assert classes() == ["Sequential", "Bilinear"]  # it has not been trained
    kept.append(stepped(own.parameters()))
    assert classes() == ["Sequential", "Bilinear", "Own"] and looks == 1
    kept.append(stepped([torch.zeros(2, device="cuda", requires_grad=True)]))  # of no module
    assert classes() == ["Sequential", "Bilinear", "Own"] and looks == 2
    assert classes() == ["Sequential", "Bilinear", "Own"] and looks == 2
    optimizers = state_names.describe()["optimizers"]
    assert sorted(len(one["parameters"]) for one in optimizers) == [1, 1, 2, 2]
    print("described")


if __name__ == "__main__":
    main()
