"""Says what the buffers of a snapshot are called, so that it can become a checkpoint that scripts load.

Device servers know bytes and handles; names live in the worker.  When proxyd wants a snapshot described,
the worker writes `client-SERIAL` beside its log, just before the commit of that step, and with `proxyd
--persist-log` `step-N` before every step's: JSON with the state of
every module on the device, and of the optimizers that have stepped (docs/snapshot-format.md).  No device call
is made, and no trouble here may disturb the training.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import gc
import itertools
import json
import os
import sys
import weakref
from collections import Counter, deque
from pathlib import Path
from typing import Any

from understudy.proxy_client import data_positions

LARGEST_CPU_TENSOR = 64 << 10
"""Bytes that are written into the description; optimizers keep their step counts on the CPU."""
KEPT = 4
"""Descriptions of older snapshots, which may be on their way to storage."""
KEPT_STEPS = 64
"""Descriptions of steps, which go with the log: proxyd's copier takes them away as their commits are made."""

_optimizers: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
"""In the order in which they first stepped, which is the same on all ranks."""
_modules: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""All there are, in the order in which they were made; see _watch()."""
_schedulers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Of learning rates, likewise."""
_count = itertools.count()
_steps: deque[int] = deque()
"""Those that were described, oldest first."""
_watching = False
_nameless: set[int] = set()
"""Parameters that no module holds, as far as was looked."""
_complained = False


def stepped(optimizer: Any) -> None:
    """An optimizer whose step ends; called before its commit."""
    from understudy.proxy_client import _client, session

    with contextlib.suppress(TypeError):  # a script's own may be one that nothing can refer to weakly
        _optimizers[optimizer] = None
    serial, step = _client.snapshot_to_describe(), _client.step_to_describe()
    if (serial or step) and session.log_directory:
        _try_to_write(serial, step, Path(session.log_directory))


def _try_to_write(serial: int, step: int, directory: Path) -> None:
    global _complained
    try:
        content = json.dumps(describe())  # json.dump() takes ten times as long
        if serial:
            _write(directory / f"client-{serial}", content)
            for old in directory.glob("client-*"):
                with contextlib.suppress(ValueError):
                    if int(old.name.removeprefix("client-")) <= serial - KEPT:
                        old.unlink(missing_ok=True)
        if step:
            _write(directory / f"step-{step}", content)
            _steps.append(step)
            if len(_steps) > KEPT_STEPS:
                (directory / f"step-{_steps.popleft()}").unlink(missing_ok=True)
    except Exception as problem:  # noqa: BLE001 - modules and optimizers are anybody's
        if not _complained:
            _complained = True
            sys.stderr.write(f"understudy: snapshots go to storage without names: {problem!r}\n")


def _write(path: Path, content: str) -> None:
    """As a whole, or not at all."""
    new = path.with_name("client.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(content)
    new.rename(path)


def describe() -> dict[str, Any]:
    """State of modules and optimizers, tensors by handle."""
    if not _watching:
        _watch()
    described, names = _describe()
    stepped = {id(p) for o in _optimizers for group in o.param_groups for p in group["params"]}
    if not stepped <= names.keys() | _nameless:  # of a module that was made in a way of its own
        _look_for_more()
        described, names = _describe()
        _nameless.clear()
        _nameless.update(stepped - names.keys())
    return described


def _describe() -> tuple[dict[str, Any], dict[int, list[Any]]]:
    """State, and what tensors are called: id -> number of the module, name."""
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
    described = {
        "modules": [
            {"class": type(module).__qualname__, "state": {n: _value(v) for n, v in state.items()}}
            for module, state in named
        ],
        "optimizers": [_optimizer(optimizer, names) for optimizer in _optimizers],
        "schedulers": [_scheduler(scheduler) for scheduler in _outer_schedulers()],
        "data": data_positions.positions(),
    }
    return described, names


def _watch() -> None:
    """From now on, note each module and scheduler that is made, also by copying and unpickling.

    To look for them each time would touch every Python object: 70 ms beside a small GPT.
    """
    global _watching
    for base, known in _kinds():
        _note_new(base, known)
    _watching = True
    _look_for_more()


def _kinds() -> list[tuple[Any, weakref.WeakValueDictionary[int, Any]]]:
    from torch.nn import Module
    from torch.optim.lr_scheduler import LRScheduler

    return [(Module, _modules), (LRScheduler, _schedulers)]


def _note_new(base: Any, known: weakref.WeakValueDictionary[int, Any]) -> None:
    made_before = base.__new__  # object's, unless somebody else has set one

    def __new__(cls: Any, *args: Any, **options: Any) -> Any:
        following = super(base, cls).__new__ if made_before is object.__new__ else made_before
        plain = following is object.__new__  # which takes no arguments
        made = following(cls) if plain else following(cls, *args, **options)
        if issubclass(type(made), base):
            known[next(_count)] = made
        return made

    base.__new__ = __new__


def _look_for_more() -> None:
    """What is there and not known yet."""
    kinds = [(base, known, {id(one) for one in list(known.values())}) for base, known in _kinds()]
    # Not isinstance(): it asks objects for their class, and some answer with a deprecation warning.
    for found in gc.get_objects():
        for base, known, ids in kinds:
            if issubclass(type(found), base) and id(found) not in ids:
                known[next(_count)] = found


def _outer_schedulers() -> list[Any]:
    """Those that are part of no other, in the order in which they were made."""
    # One that is just being made, by another thread or around its optimizer's step, has no state yet.
    found = [one for one in list(_schedulers.values()) if "last_epoch" in vars(one)]
    inner = {id(part) for one in found for part in getattr(one, "_schedulers", ())}
    return [one for one in found if id(one) not in inner]


def _scheduler(scheduler: Any) -> dict[str, Any]:
    """As its state_dict(), if that is PyTorch's: a script's own may do anything, as talk to other ranks."""
    kind = type(scheduler)
    parts: list[Any] = [kind, *map(type, getattr(scheduler, "_schedulers", ()))]
    if any(part.state_dict.__module__ != "torch.optim.lr_scheduler" for part in parts):
        return {"class": kind.__qualname__, "state": {"state": {"omitted": "kept in a way of its own"}}}
    state = {name: _value(value) for name, value in scheduler.state_dict().items()}
    return {"class": kind.__qualname__, "state": state}


def _roots() -> list[Any]:
    """Modules that are part of no other, in the order in which they were made."""
    # One that is just being made by another thread has no parameters yet.
    modules = [module for module in list(_modules.values()) if "_parameters" in vars(module)]
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
    if isinstance(value, dict) and all(isinstance(key, (int, str)) for key in value):
        items = [[key, _value(item)] for key, item in value.items()]
        return {"counter" if isinstance(value, Counter) else "dict": items}
    return {"omitted": f"a {type(value).__qualname__}"}


def _shard(tensor: Any) -> dict[str, Any] | None:
    """This rank's part of a DTensor, and which part it is; None if it is no block of the whole."""
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements, local = tensor.device_mesh, tensor.placements, tensor._local_tensor
    if any(isinstance(placement, Partial) for placement in placements):
        return None  # a sum over ranks
    try:
        size, at = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
        place = {"of": list(map(int, tensor.shape)), "at": list(map(int, at))}
        ranks = [int(rank) for rank in mesh.mesh.flatten().tolist()]
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return None
    if tuple(size) != tuple(local.shape):
        return None
    return _tensor(local) | {"shard": place | {"ranks": ranks}}


def _tensor(tensor: Any) -> dict[str, Any]:
    import torch

    from understudy.proxy_client import _client

    described = {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "size": list(tensor.shape),
        "stride": list(tensor.stride()) if tensor.layout == torch.strided and not tensor.is_nested else [],
    }
    kind = type(tensor)
    if hasattr(tensor, "_local_tensor") and hasattr(tensor, "device_mesh"):
        return _shard(tensor) or described | {"omitted": f"a {kind.__qualname__} of an uncommon kind"}
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
    content = tensor
    if tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():  # each of these takes microseconds
        content = tensor.detach().resolve_conj().resolve_neg().contiguous()
    data = ctypes.string_at(content.data_ptr(), content.nbytes) if content.nbytes else b""
    return described | {"stride": list(content.stride()), "content": base64.b64encode(data).decode()}
