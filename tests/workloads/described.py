"""Models and optimizers of many kinds: what the worker says of them must be what state_dict() says."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from understudy.proxy_client import _client, state_names
from understudy.recovery.snapshots.writing.description import read_description


class Own(schedulers.StepLR):
    """Whose state is for itself to tell."""

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("a scheduler of the script's own was asked")


class Tied(nn.Module):
    """Shared weights, buffers of both kinds, a parametrization, a hook that must not run."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.normalised = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.missing = None
        self.register_parameter("absent", None)
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("scratch", torch.zeros(5), persistent=False)
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))
        self.register_state_dict_pre_hook(self._forbidden)
        self.calm = True

    def _forbidden(self, *_: Any) -> None:
        assert self.calm, "a hook of the script ran"

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.normalised(self.embedding(words)))  # type: ignore[no-any-return]


def main() -> None:
    first, second = Tied().cuda(), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).cuda()
    nn.Linear(2, 2)  # on the CPU, and trained by nobody
    nn.CrossEntropyLoss()
    wrapped = torch.compile(second, backend="eager")
    adam = torch.optim.AdamW(
        [
            {"params": first.parameters()},
            {"params": [second[0].weight], "lr": torch.tensor(0.5, device="cuda")},
        ],
        lr=1e-3,
        capturable=True,
    )
    momentum = torch.optim.SGD([second[0].bias], lr=0.1, momentum=0.9)
    schedule = schedulers.MultiStepLR(momentum, [1, 1, 4])
    outer = schedulers.SequentialLR(
        momentum,
        [schedulers.ConstantLR(momentum), schedulers.LambdaLR(momentum, lambda epoch: 1 / (1 + epoch))],
        milestones=[1],
    )
    own = Own(momentum, 1)
    for _ in range(2):
        loss = (
            first(torch.arange(7, device="cuda")).square().sum()
            + wrapped(torch.ones(4, 3, device="cuda")).sum()
        )
        loss.backward()
        adam.step()
        momentum.step()
        schedule.step()
    first.calm = False
    before = _client.statistics()["records"]
    described = json.loads(json.dumps(state_names.describe()))
    assert _client.statistics()["records"] == before, "device calls were made"
    first.calm = True
    by_class = {module["class"]: module["state"] for module in described["modules"]}
    assert set(by_class) == {"Tied", "Sequential"}, by_class.keys()
    for name, module in (("Tied", first), ("Sequential", second)):
        assert list(by_class[name]) == list(module.state_dict()), (
            list(by_class[name]),
            list(module.state_dict()),
        )
        for key, tensor in module.state_dict().items():
            told = by_class[name][key]
            assert told["size"] == list(tensor.shape) and told["dtype"] == str(tensor.dtype)[6:], (key, told)
            assert told["handle"] > 0, (key, told)
    tied = by_class["Tied"]
    assert tied["embedding.weight"]["handle"] == tied["head.weight"]["handle"]
    for optimizer in (adam, momentum):
        (told,) = (o for o in described["optimizers"] if o["class"] == type(optimizer).__qualname__)
        wanted = optimizer.state_dict()
        assert [group["params"] for group in told["groups"]] == [g["params"] for g in wanted["param_groups"]]
        for group, options in zip(told["groups"], wanted["param_groups"], strict=True):
            assert set(group["options"]) == set(options) - {"params"}
        assert {int(number) for number in told["state"]} == set(wanted["state"])
        for number, values in wanted["state"].items():
            assert set(told["state"][str(number)]) == set(values)
    first_one, second_one, third = described["schedulers"]
    read = read_description(json.dumps(described).encode()).schedulers
    assert (first_one["class"], second_one["class"]) == ("MultiStepLR", "SequentialLR")
    assert dict(read[0].state) == schedule.state_dict()
    assert isinstance(read[0].state["milestones"], Counter)
    assert dict(read[1].state) == outer.state_dict()
    assert third == {"class": "Own", "state": {"state": {"omitted": "kept in a way of its own"}}}
    assert own.last_epoch == 0
    print("described")


if __name__ == "__main__":
    main()
