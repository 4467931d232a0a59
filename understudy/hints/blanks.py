"""Empty objects, to be filled with what a checkpoint has, where the new process does not have them yet."""

from __future__ import annotations

import collections
import random
import sys
import types
from typing import Any

import torch

from .source import HintError


def blank_of(kind: str, value: Any) -> Any:
    """What is to be known, besides its content, to make such an object."""
    match kind:
        case "storage":
            return (value.nbytes(), str(value.device))
        case "tensor":
            return (isinstance(value, torch.nn.Parameter), value.dtype, str(value.device))
        case "array":
            return (value.shape, value.dtype.str)
        case "generator":
            return None if isinstance(value, random.Random) else str(value.device)
        case "deque":
            return value.maxlen
        case "cell":
            return None
        case "same":
            return type(value) is object
    return type(value)


def made(kind: str, blank: Any) -> Any:
    match kind:
        case "storage":
            return torch.UntypedStorage(blank[0], device=blank[1])
        case "tensor":
            tensor = torch.empty(0, dtype=blank[1], device=blank[2])
            return torch.nn.Parameter(tensor, requires_grad=False) if blank[0] else tensor
        case "array":
            return sys.modules["numpy"].empty(*blank)
        case "generator":
            return random.Random() if blank is None else torch.Generator(blank)
        case "cell":
            return types.CellType()
        case "same":
            if not blank:
                raise HintError("A global holds another function than it did; make the same, or begin anew.")
            return object()
        case "deque":
            return collections.deque(maxlen=blank)
    return blank.__new__(blank)
