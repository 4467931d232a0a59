"""Cases of `module_db`: construction on the device, forward, backward, and inputs that must be refused."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from cases import Case, Execution, Run, seed_everything
from cuda_autocast import KINDS, under_autocast
from databases import Unit, dtype_name
from observation import observe
from snapshots import Snapshot, tensors_in


def cases(unit: Unit) -> Iterator[Case]:
    """In an order that is always the same."""
    info, dtype, seed = unit.entry.info, unit.dtype, unit.entry.seed
    number = 0
    for training in (True, False) if info.train_and_eval_differ else (True,):
        seed_everything(seed)
        inputs = info.module_inputs_func(
            info, device="cpu", dtype=dtype, requires_grad=True, training=training
        )
        for given in inputs:
            construction, forward = given.constructor_input, given.forward_input
            model = Snapshot((construction.args, construction.kwargs))
            if training and _has_factory_arguments(info.module_cls):
                yield Case("construction", number, _construct(info.module_cls, model, dtype))
            if forward is not None:
                call = Snapshot((forward.args, forward.kwargs))
                run = _train(info.module_cls, model, call, dtype, training=training, seed=seed)
                yield Case("training" if training else "evaluation", number, run)
                if training and dtype is torch.float32:
                    for kind in KINDS:
                        run = _train(info.module_cls, model, call, dtype, training=True, seed=seed, kind=kind)
                        yield Case(f"autocast {dtype_name(kind)}", number, run)
            number += 1
    if info.module_error_inputs_func is not None:
        yield from _error_cases(info, dtype, seed)


def _has_factory_arguments(module_class: type) -> bool:
    return {"device", "dtype"} <= set(inspect.signature(module_class).parameters)


def _construct(module_class: Any, arguments: Snapshot, dtype: torch.dtype) -> Run:
    """Parameters drawn on the device itself."""

    def run(device: str) -> Execution:
        args, kwargs = arguments.build(device)
        module = module_class(*args, **{**kwargs, "device": device, "dtype": dtype})
        return Execution(lambda: observe((), [("state", _state(module))]))

    return run


def _train(
    module_class: Any,
    arguments: Snapshot,
    call: Snapshot,
    dtype: torch.dtype,
    *,
    training: bool,
    seed: int,
    kind: torch.dtype | None = None,
) -> Run:
    """Made on the CPU and moved, as most scripts do it; then forward and, where it can be, backward.

    `kind`: of autocast, if there is to be any.
    """

    def run(device: str) -> Execution:
        args, kwargs = arguments.build("cpu")
        module = module_class(*args, **kwargs).to(dtype).to(device).train(training)
        args, kwargs = given = call.build(device)
        seed_everything(seed)
        forward = under_autocast(module, kind) if kind else module
        result = forward(*args, **kwargs)
        outputs = [tensor for tensor in tensors_in(result) if tensor.requires_grad]
        inputs = [tensor for tensor in tensors_in(given) if tensor.requires_grad]
        if outputs:
            directions = [torch.ones(tensor.shape, dtype=tensor.dtype).to(device) for tensor in outputs]
            torch.autograd.backward(outputs, directions)
        gradients = [tensor.grad for tensor in [*inputs, *module.parameters()]]
        parts = [("result", result), ("gradient", gradients), ("state", _state(module))]
        return Execution(lambda: observe(given, parts))

    return run


def _state(module: torch.nn.Module) -> dict[str, Any]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _error_cases(info: Any, dtype: torch.dtype, seed: int) -> Iterator[Case]:
    seed_everything(seed)
    bad_inputs = info.module_error_inputs_func(
        info, device="cpu", dtype=dtype, requires_grad=False, training=True
    )
    for number, bad in enumerate(bad_inputs):
        construction, forward = bad.module_error_input.constructor_input, bad.module_error_input.forward_input
        model = Snapshot((construction.args, construction.kwargs))
        call = Snapshot((forward.args, forward.kwargs) if forward is not None else None)
        yield Case("error", number, _train_or_construct(info.module_cls, model, call))


def _train_or_construct(module_class: Any, arguments: Snapshot, call: Snapshot) -> Run:
    def run(device: str) -> Execution:
        args, kwargs = arguments.build("cpu")
        module = module_class(*args, **kwargs).to(device)
        given = call.build(device)
        result = module(*given[0], **given[1]) if given is not None else None
        return Execution(lambda: observe(given, [("result", result)]))

    return run
