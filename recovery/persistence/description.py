"""Reads what a worker said of its snapshot (proxy_client/state_names.py); it may have said anything."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class Undescribed(ValueError):
    """Why a snapshot cannot become a checkpoint with names, in a sentence."""


@dataclass(frozen=True)
class TensorPlace:
    """A tensor, `size` and `stride` in elements: `offset` bytes behind the beginning of a buffer, or here."""

    dtype: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    handle: int
    """Of its buffer; 0: its bytes are `content`."""
    offset: int
    content: bytes


@dataclass(frozen=True)
class Omitted:
    """What the worker could not describe, and why."""

    why: str


@dataclass(frozen=True)
class ModuleState:
    """As its state_dict()."""

    class_name: str
    state: Mapping[str, Any]
    """TensorPlace, Omitted, or a plain value."""


@dataclass(frozen=True)
class Group:
    """Of an optimizer's parameters, by number."""

    options: Mapping[str, Any]
    parameters: tuple[int, ...]


@dataclass(frozen=True)
class OptimizerState:
    """As its state_dict(); `names` of its parameters: (number of the module, name), or None."""

    class_name: str
    groups: tuple[Group, ...]
    state: Mapping[int, Mapping[str, Any]]
    names: tuple[tuple[int, str] | None, ...]


@dataclass(frozen=True)
class Description:
    """Of one rank."""

    modules: tuple[ModuleState, ...]
    optimizers: tuple[OptimizerState, ...]


def read_description(content: bytes) -> Description:
    """Raises Undescribed."""
    if not content:
        raise Undescribed("its worker did not say what its buffers are called")
    try:
        document = json.loads(content)
        return Description(
            tuple(
                ModuleState(str(module["class"]), {str(n): _value(v) for n, v in module["state"].items()})
                for module in document["modules"]
            ),
            tuple(_optimizer(optimizer) for optimizer in document["optimizers"]),
        )
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as problem:
        raise Undescribed(f"what its worker said of its buffers makes no sense ({problem!r})") from problem


def _optimizer(document: Mapping[str, Any]) -> OptimizerState:
    return OptimizerState(
        str(document["class"]),
        tuple(
            Group(
                {str(key): _value(value) for key, value in group["options"].items()},
                tuple(int(number) for number in group["params"]),
            )
            for group in document["groups"]
        ),
        {
            int(number): {str(key): _value(value) for key, value in values.items()}
            for number, values in document["state"].items()
        },
        tuple(None if name is None else (int(name[0]), str(name[1])) for name in document["parameters"]),
    )


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return [_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(_value(item) for item in value["tuple"])
    if "omitted" in value:
        return Omitted(str(value["omitted"]))
    place = TensorPlace(
        str(value["dtype"]), tuple(map(int, value["size"])), tuple(map(int, value["stride"])),
        int(value.get("handle", 0)), int(value.get("offset", 0)),
        base64.b64decode(value.get("content", ""), validate=True),
    )  # fmt: skip
    if len(place.size) != len(place.stride) or place.offset < 0 or min((*place.size, *place.stride, 0)) < 0:
        raise ValueError(f"a tensor of size {place.size}, stride {place.stride}")
    return place
