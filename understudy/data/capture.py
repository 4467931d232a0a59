"""What is packed into a checkpoint: the states of objects, and of every generator of random numbers."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch


def state_of(part: Any) -> Any:
    """The state of a model, optimizer, sampler, … or of a `torch.Generator`."""
    part = bare(part)
    return part.get_state() if isinstance(part, torch.Generator) else part.state_dict()


def restore(part: Any, state: Any) -> None:
    """The reverse of `state_of`."""
    part = bare(part)
    if isinstance(part, torch.Generator):
        part.set_state(state)
    else:
        part.load_state_dict(state)


def is_packable(part: Any) -> bool:
    """Whether it has a state that can be taken and given back."""
    part = bare(part)
    return isinstance(part, torch.Generator) or all(
        callable(getattr(part, name, None)) for name in ("state_dict", "load_state_dict")
    )


def bare(part: Any) -> Any:
    """The model inside DistributedDataParallel and torch.compile.

    Their names in front of each key would bind a checkpoint to the number of ranks, or to compiling.
    """
    while True:
        if isinstance(part, torch.nn.parallel.DistributedDataParallel):
            part = part.module
        elif isinstance(part, torch.nn.Module) and "_orig_mod" in part._modules:
            part = part._modules["_orig_mod"]
        else:
            return part


def snapshot(state: Any, copies: bool) -> Any:
    """A state that later training steps do not change: containers anew, and with `copies` tensors in CPU
    memory.

    A tensor that occurs twice stays one. NumPy's scalars, which some schedulers hold, become Python's: a file
    that has them is not read back without executing pickles.
    """
    return _Snapshot(copies).of(state)


class _Snapshot:
    def __init__(self, copies: bool) -> None:
        self.copies = copies
        self.made: dict[int, torch.Tensor] = {}

    def of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value) if self.copies else value
        if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
            return value.item()
        if isinstance(value, dict):
            made = value.copy()  # of its own class, which may be an OrderedDict or a Counter
            for key, one in value.items():
                made[key] = self.of(one)
            if metadata := getattr(value, "_metadata", None):  # versions of modules, which loading looks at
                made._metadata = metadata  # type: ignore[attr-defined]
            return made
        if type(value) in (list, tuple, set):
            return type(value)(self.of(one) for one in value)
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self.made:
            plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
            source = tensor.detach()
            # A subclass (DTensor) knows where it lies: it is copied there, and moved when it is written.
            self.made[id(tensor)] = source.to("cpu", copy=True) if plain else source.clone()
        return self.made[id(tensor)]


def generators() -> dict[str, Any]:
    """The states of Python's, NumPy's (if it is loaded) and PyTorch's generators, of CPU and devices."""
    found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if numpy := sys.modules.get("numpy"):
        kind, keys, *rest = numpy.random.get_state()
        found["numpy"] = [str(kind), keys.tolist(), *rest]
    for name, device in _devices().items():
        found[name] = device.get_rng_state_all()
    return found


def restore_generators(states: Mapping[str, Any]) -> None:
    """The reverse of `generators`. What is not loaded or not there is left out, with a warning."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    devices, numpy = _devices(), sys.modules.get("numpy")
    for name, state in states.items():
        if name == "numpy" and numpy is not None:
            kind, keys, *rest = state
            numpy.random.set_state((kind, numpy.array(keys, dtype="uint32"), *rest))
        elif name in devices:
            device = devices[name]
            for number, one in enumerate(state[: device.device_count()]):
                device.set_rng_state(one, number)
        elif name not in ("python", "torch"):
            warnings.warn(
                f"The checkpoint has the state of the generators of {name}, which this process has not "
                "loaded or does not have; numbers drawn from them will not be those of a run that never "
                "stopped.",
                stacklevel=2,
            )


def _devices() -> dict[str, ModuleType]:
    """Kinds of devices in use. One that is not in use yet is not made to start."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return {}
    module = torch.get_device_module(accelerator)
    in_use = getattr(module, "is_initialized", lambda: True)()
    return {accelerator.type: module} if in_use and hasattr(module, "get_rng_state_all") else {}
