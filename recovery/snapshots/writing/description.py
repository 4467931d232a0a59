"""Reads what a worker said of its snapshot (proxy_client/state_names.py); it may have said anything."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

MOST_RANKS = 1 << 16


class Undescribed(ValueError):
    """Why a snapshot cannot become a checkpoint with names, in a sentence."""


@dataclass(frozen=True)
class Shard:
    """Which block of a whole tensor this is, in elements by dimension; `ranks` hold all of its blocks."""

    of: tuple[int, ...]
    at: tuple[int, ...]
    ranks: tuple[int, ...]


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
    shard: Shard | None = None
    """None: it is whole."""


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
    """A group of an optimizer's parameters, by number."""

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
class LoaderPosition:
    """How far a DataLoader was read, right behind the step; None: that is not known."""

    loader: int
    """In the order in which the script first iterated them."""
    class_name: str
    iterations: int
    """How often it was begun: epochs, mostly."""
    batches: int | None
    """That the newest iteration has handed out."""
    batch_size: int | None
    may_read_ahead: bool
    """Whether its class iterates in a way of its own, so that a batch may be handed out and not used yet."""
    sampler: Mapping[str, int | str | bool] | None
    """What understudy.data's sampler loads to go on behind this step."""

    def document(self) -> dict[str, Any]:
        """As the worker has written it."""
        told = asdict(self)
        return {"class": told.pop("class_name")} | told


@dataclass(frozen=True)
class Description:
    """What one rank says of its state; schedulers have a state_dict(), too."""

    modules: tuple[ModuleState, ...]
    optimizers: tuple[OptimizerState, ...]
    schedulers: tuple[ModuleState, ...] = ()
    data: tuple[LoaderPosition, ...] = ()

    def find(self, path: Sequence[Any]) -> Any:
        """("modules", number, name), ("optimizers", number, parameter, key); None if it is not there."""
        found: Mapping[Any, Any]
        if path[0] == "modules" and path[1] < len(self.modules):
            found = self.modules[path[1]].state
        elif path[0] == "optimizers" and path[1] < len(self.optimizers):
            found = self.optimizers[path[1]].state.get(path[2], {})
        else:
            return None
        return found.get(path[-1])


def read_description(content: bytes) -> Description:
    """Raises Undescribed."""
    if not content:
        raise Undescribed("its worker did not say what its buffers are called")
    try:
        document = json.loads(content)
        return Description(
            tuple(_module(module) for module in document["modules"]),
            tuple(_optimizer(optimizer) for optimizer in document["optimizers"]),
            tuple(_module(scheduler) for scheduler in document.get("schedulers", ())),
            tuple(_position(loader) for loader in document.get("data", ())),
        )
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as problem:
        raise Undescribed(f"what its worker said of its buffers makes no sense ({problem!r})") from problem


def _module(document: Mapping[str, Any]) -> ModuleState:
    return ModuleState(str(document["class"]), {str(n): _value(v) for n, v in document["state"].items()})


def _position(document: Mapping[str, Any]) -> LoaderPosition:
    batches, batch_size = (_count_or_none(document[name]) for name in ("batches", "batch_size"))
    sampler = document["sampler"]
    if sampler is not None and not all(isinstance(value, (int, str)) for value in sampler.values()):
        raise ValueError("a sampler whose state is not numbers and texts")
    return LoaderPosition(
        int(document["loader"]), str(document["class"]), int(document["iterations"]), batches, batch_size,
        bool(document["may_read_ahead"]),
        None if sampler is None else {str(name): value for name, value in sampler.items()},
    )  # fmt: skip


def _count_or_none(value: Any) -> int | None:
    return None if value is None else int(value)


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
    if "dict" in value:
        return dict(_items(value["dict"]))
    if "counter" in value:
        return Counter(dict(_items(value["counter"])))
    if "omitted" in value:
        return Omitted(str(value["omitted"]))
    place = TensorPlace(
        str(value["dtype"]), tuple(map(int, value["size"])), tuple(map(int, value["stride"])),
        int(value.get("handle", 0)), int(value.get("offset", 0)),
        base64.b64decode(value.get("content", ""), validate=True), _shard(value.get("shard"), value["size"]),
    )  # fmt: skip
    if len(place.size) != len(place.stride) or place.offset < 0 or min((*place.size, *place.stride, 0)) < 0:
        raise ValueError(f"a tensor of size {place.size}, stride {place.stride}")
    return place


def _items(pairs: Any) -> list[tuple[int | str, Any]]:
    items = [(key, _value(value)) for key, value in pairs]
    if not all(isinstance(key, (int, str)) for key, _ in items):
        raise ValueError("a key that is neither a number nor a name")
    return items


def _shard(document: Any, size: Sequence[Any]) -> Shard | None:
    if document is None:
        return None
    of, at, ranks = (tuple(map(int, document[name])) for name in ("of", "at", "ranks"))
    if not len(of) == len(at) == len(size) or min((*at, *ranks, 0)) < 0 or not 0 < len(ranks) <= MOST_RANKS:
        raise ValueError(f"a block at {at} of {of}")
    if any(begin + int(count) > whole for begin, count, whole in zip(at, size, of, strict=True)):
        raise ValueError(f"a block of {tuple(size)} at {at} of {of}")
    return Shard(of, at, ranks)
