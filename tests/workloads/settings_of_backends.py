"""Sets whatever torch.backends lets a script set, one after the other, to something else and back.

Prints `RESULT` and {"silent": of which properties the device server did not hear, "heard": of how many}.
"""

from __future__ import annotations

import json
import pkgutil
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.backends

from understudy.proxy_client import _client


def settable() -> Iterator[tuple[str, Any, str]]:
    """(name, object, attribute) of every property with a setter below torch.backends, once each."""
    names = [f"torch.backends.{module.name}" for module in pkgutil.iter_modules(torch.backends.__path__)]
    holders: list[tuple[str, Any]] = [("torch.backends", torch.backends)]
    holders += [(name, sys.modules[name]) for name in names if name in sys.modules]
    for name, holder in holders:
        module = getattr(holder, "m", holder)  # what a PropModule stands for
        holders += [
            (f"{name}.{attribute}", value)
            for attribute, value in [*vars(module).items(), *vars(type(holder)).items()]
            if type(value).__module__.startswith("torch.backends")
            and not isinstance(value, ModuleType)
            and hasattr(type(value), "__setattr__")
            and "Prop" not in type(value).__name__
        ]
        for attribute, value in vars(type(holder)).items():
            if type(value).__name__ == "ContextProp" and value.setter is not None:
                yield f"{name}.{attribute}", holder, attribute
        if type(holder).__name__ == "_FP32Precision":
            yield f"{name}.fp32_precision", holder, "fp32_precision"
        if type(holder).__name__ == "cuBLASModule":
            for attribute in (
                "allow_tf32",
                "allow_fp16_reduced_precision_reduction",
                "allow_fp16_accumulation",
                "allow_bf16_reduced_precision_reduction",
                "fp32_precision",
            ):
                yield f"{name}.{attribute}", holder, attribute


def another(value: Any) -> list[Any]:
    """Values that are not this one; the first that PyTorch takes is taken."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    return [text for text in ("ieee", "tf32", "bf16", "qnnpack", "onednn", "fbgemm") if text != value]


def set_to_something_else(holder: Any, attribute: str) -> bool:
    before = getattr(holder, attribute)
    for value in another(before):
        try:
            setattr(holder, attribute, value)
        except (RuntimeError, ValueError):
            continue
        if getattr(holder, attribute) != before:
            return True
    return False


torch.ones(1, device="cuda")
silent, heard, refused = [], 0, []
for name, holder, attribute in settable():
    before, was = _client.known_settings(), getattr(holder, attribute)
    if not set_to_something_else(holder, attribute):
        refused.append(name)
    elif _client.known_settings() == before:
        silent.append(name)
    else:
        heard += 1
        setattr(holder, attribute, was)
print("RESULT " + json.dumps({"silent": silent, "heard": heard, "refused": refused}))
