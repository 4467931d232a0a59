"""Cases of `optim_db`: a few steps with every configuration and implementation, and what must be refused.

An optimizer chooses its implementation by the device of its parameters; natively it is made to choose as on
CUDA (`cuda_choices.py`), and lets `capturable` pass: one algorithm is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from cases import Case, Execution, Run
from databases import Unit
from observation import observe
from snapshots import Snapshot

_STEPS = 3
_IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "default": {},
    "forloop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "differentiable": {"differentiable": True},
}


def cases(unit: Unit) -> Iterator[Case]:
    """In an order that is always the same."""
    info, dtype = unit.entry.info, unit.dtype
    number = 0
    for configuration in info.optim_inputs_func(device="cuda"):
        for name, flags in _IMPLEMENTATIONS.items():
            if name not in ("default", "forloop", *info.supported_impls):
                continue
            if name == "forloop" and "foreach" not in info.supported_impls:
                continue
            if name == "fused" and configuration.kwargs.get("capturable"):
                flags = {**flags, "capturable": True}
            arguments = Snapshot({**configuration.kwargs, **flags})
            yield Case(name, number, _train(info, arguments, dtype), says_where=False)
            number += 1
    if info.optim_error_inputs_func is not None and dtype == unit.entry.dtypes[0]:
        for number, bad in enumerate(info.optim_error_inputs_func("cpu", dtype)):
            given = bad.optimizer_error_input
            yield Case("error", number, _refuse(info, Snapshot((given.params, given.kwargs)), dtype))


def _train(info: Any, arguments: Snapshot, dtype: torch.dtype) -> Run:
    def run(device: str) -> Execution:
        parameters = _parameters(info, dtype, device)
        # Configurations hold tensors (a learning rate, say), which stay on the CPU as scripts have them.
        optimizer = info.optim_cls(parameters, **arguments.build("cpu"))
        closure = _closure(info, optimizer, parameters)
        for _ in range(_STEPS):
            loss = closure()
            if info.step_requires_closure:
                optimizer.step(closure)
            elif arguments.build("cpu").get("differentiable"):
                with torch.no_grad():
                    optimizer.step()
            else:
                optimizer.step()
        state = [optimizer.state[parameter] for parameter in parameters]
        return Execution(lambda: observe(parameters, [("loss", loss), ("state", state)]))

    return run


def _parameters(info: Any, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Of several shapes, one with other strides, one a view into a larger memory."""
    whole = torch.randn(40, dtype=torch.float64)
    made = [whole[:12].reshape(3, 4), whole[12:24].reshape(4, 3).t()]
    if info.optim_cls.__name__ != "Muon":  # takes matrices only
        made += [whole[24:29], whole[29:37].reshape(2, 2, 2), whole[37]]
    return [torch.nn.Parameter(tensor.to(dtype).clone().to(device)) for tensor in made]


def _closure(info: Any, optimizer: Any, parameters: list[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Gradients that depend on the parameters."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        if info.only_supports_sparse_grads:
            for parameter in parameters:
                parameter.grad = (parameter.detach() * 2).to_sparse()
            return torch.zeros(())
        loss = sum(((parameter * parameter).sum() for parameter in parameters), torch.zeros(()))
        loss.backward()
        return loss.detach()

    return closure


def _refuse(info: Any, arguments: Snapshot, dtype: torch.dtype) -> Run:
    def run(device: str) -> Execution:
        parameters, kwargs = arguments.build(device)
        if parameters is None:
            parameters = _parameters(info, dtype, device)
        optimizer = info.optim_cls(parameters, **kwargs)
        optimizer.step()
        return Execution(lambda: observe((), [("class", type(optimizer).__name__)]))

    return run
