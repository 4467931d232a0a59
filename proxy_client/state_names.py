"""Says what the buffers of a snapshot are called, so that it can become a checkpoint that scripts load.

Device servers know bytes and handles; names live in the worker.  When proxyd wants a snapshot described,
the worker writes `client-SERIAL` beside its log, just before the commit of that step: JSON with the state of
every module on the device, and of the optimizers that have stepped (docs/snapshot-format.md).  No device call
is made, and no trouble here may disturb the training.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import gc
import json
import os
import sys
import weakref
from pathlib import Path
from typing import Any

LARGEST_CPU_TENSOR = 64 << 10
"""Bytes that are written into the description; optimizers keep their step counts on the CPU."""
KEPT = 4
"""Descriptions of older snapshots, which may be on their way to storage."""

_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
_complained = False


def stepped(optimizer: Any) -> None:
    """An optimizer whose step ends; called before its commit."""
    from proxy_client import _client, session

    _optimizers.add(optimizer)
    serial = _client.snapshot_to_describe()
    if serial and session.log_directory:
        _try_to_write(serial, Path(session.log_directory))


def _try_to_write(serial: int, directory: Path) -> None:
    global _complained
    try:
        new = directory / "client.new"
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(describe(), file)
        new.rename(directory / f"client-{serial}")
        for old in directory.glob("client-*"):
            with contextlib.suppress(ValueError):
                if int(old.name.removeprefix("client-")) <= serial - KEPT:
                    old.unlink(missing_ok=True)
    except Exception as problem:  # noqa: BLE001 - modules and optimizers are anybody's
        if not _complained:
            _complained = True
            sys.stderr.write(f"understudy: snapshots go to storage without names: {problem!r}\n")


def describe() -> dict[str, Any]:
    """State of modules and optimizers, tensors by handle."""
    modules = [_unwrapped(module) for module in _roots()]
    states = [_state(module) for module in modules]
    named = [
        (module, state)
        for module, state in zip(modules, states, strict=True)
        if any(_is_tensor(value) and value.is_cuda for value in state.values())
    ]
    names = {
        id(value): [number, name]
        for number, (_, state) in enumerate(named)
        for name, value in state.items()
        if _is_tensor(value)
    }
    return {
        "modules": [
            {"class": type(module).__qualname__, "state": {n: _value(v) for n, v in state.items()}}
            for module, state in named
        ],
        "optimizers": [_optimizer(optimizer, names) for optimizer in _optimizers],
    }


def _roots() -> list[Any]:
    """Modules that are part of no other, in the order in which they were made."""
    from torch.nn import Module

    # Not isinstance(): it asks objects for their class, and some answer with a deprecation warning.
    modules = [found for found in gc.get_objects() if issubclass(type(found), Module)]
    inner = {id(child) for module in modules for child in getattr(module, "_modules", {}).values()}
    return [module for module in modules if id(module) not in inner]


def _state(module: Any) -> dict[str, Any]:
    """As its state_dict(), whose hooks may do anything: those of sharded models talk to other ranks."""
    found = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        kept = [*part._parameters.items(), *part._buffers.items()]
        for name, value in kept:
            if value is not None and name not in part._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = value
    return found


def _unwrapped(module: Any) -> Any:
    """What a script calls its model: not what was put around it to train it."""
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    while True:
        if isinstance(module, (DistributedDataParallel, DataParallel)):
            module = module.module
        elif "_orig_mod" in getattr(module, "_modules", {}):  # torch.compile
            module = module._orig_mod
        else:
            return module


def _optimizer(optimizer: Any, names: dict[int, list[Any]]) -> dict[str, Any]:
    """As its state_dict(): parameters by number, in the order of the groups."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    number_of = {id(p): number for number, p in enumerate(parameters)}
    groups = []
    for group in optimizer.param_groups:
        options = {key: _value(value) for key, value in group.items() if key != "params"}
        groups.append({"options": options, "params": [number_of[id(p)] for p in group["params"]]})
    state = {
        str(number_of[id(parameter)]): {key: _value(value) for key, value in values.items()}
        for parameter, values in optimizer.state.items()
        if id(parameter) in number_of
    }
    return {
        "class": type(optimizer).__qualname__,
        "groups": groups,
        "state": state,
        "parameters": [names.get(id(parameter)) for parameter in parameters],
    }


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _value(value: Any) -> Any:
    """A tensor, or anything that JSON holds; what is neither is named, and left out."""
    if _is_tensor(value):
        return _tensor(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        items = [_value(item) for item in value]
        return {"tuple": items} if isinstance(value, tuple) else items
    return {"omitted": f"a {type(value).__qualname__}"}


def _tensor(tensor: Any) -> dict[str, Any]:
    import torch

    from proxy_client import _client

    described = {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "size": list(tensor.shape),
        "stride": list(tensor.stride()) if tensor.layout == torch.strided and not tensor.is_nested else [],
    }
    kind = type(tensor)
    if kind not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return described | {"omitted": f"a {kind.__qualname__}, whose other parts are on other ranks"}
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        return described | {"omitted": "a tensor that is not dense"}
    if tensor.is_cuda:
        handle, displacement = _client.locate(tensor)
        offset = displacement + tensor.storage_offset() * tensor.element_size()
        return described | {"handle": handle, "offset": offset}
    if tensor.device.type != "cpu" or tensor.nbytes > LARGEST_CPU_TENSOR:
        return described | {"omitted": f"{tensor.nbytes} bytes on {tensor.device}"}
    content = tensor.detach().resolve_conj().resolve_neg().contiguous()
    data = ctypes.string_at(content.data_ptr(), content.nbytes) if content.nbytes else b""
    return described | {"stride": list(content.stride()), "content": base64.b64encode(data).decode()}
