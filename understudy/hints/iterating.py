"""Iterators with a position that can be saved, and context managers that can be entered again."""

from __future__ import annotations

import io
import random
import sys
import types
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any, cast

import torch

from . import open_files

_MADE_ANEW: tuple[type, ...] = (dict, type({}.keys()), type({}.values()), type({}.items()))
_SAMPLERS = (
    "SequentialSampler",
    "RandomSampler",
    "BatchSampler",
    "SubsetRandomSampler",
    "WeightedRandomSampler",
)
_MANAGERS = frozenset(
    {
        "contextlib.nullcontext",
        "contextlib.suppress",
        "contextlib.chdir",
        "torch.autograd.grad_mode.no_grad",
        "torch.autograd.grad_mode.enable_grad",
        "torch.autograd.grad_mode.set_grad_enabled",
        "torch.autograd.grad_mode.inference_mode",
        "torch.autograd.anomaly_mode.detect_anomaly",
        "torch.amp.autocast_mode.autocast",
        "torch.cpu.amp.autocast_mode.autocast",
        "torch.cuda.amp.autocast_mode.autocast",
    }
)


class Position(Iterator[Any]):
    """Of an iterable whose own iterators cannot be saved: made anew, and gone through to the same place.

    What the iterable draws from generators while it is gone through is drawn from where they were at its
    beginning; afterwards they are where they were.
    """

    def __init__(self, iterable: Any) -> None:
        self.iterable, self.count, self.ended = iterable, 0, False
        self.drawn = _drawn_from(iterable) if isinstance(iterable, _loader()) else None
        self.size = len(cast(Any, iterable)) if isinstance(iterable, _MADE_ANEW) else None
        """Of a dictionary, at the beginning; one that has another by then cannot be gone on with."""
        self._iterator: Iterator[Any] | None = iter(iterable)

    def __next__(self) -> Any:
        if self.ended:
            raise StopIteration
        if self._iterator is None:
            self._iterator = self._gone_through()
        try:
            item = next(self._iterator)
        except StopIteration:
            self.ended, self.iterable, self._iterator = True, (), None
            raise
        self.count += 1
        return item

    def __reduce__(self) -> Any:
        return (Position.again, (self.iterable, self.count, self.ended, self.drawn, self.size))

    @classmethod
    def again(cls, iterable: Any, count: int, ended: bool, drawn: Any, size: int | None) -> Position:
        """Nothing is iterated yet: what the iterable is made of may not be complete."""
        made = cls.__new__(cls)
        made.iterable, made.count, made.ended, made.drawn, made.size = iterable, count, ended, drawn, size
        made._iterator = None
        return made

    def _gone_through(self) -> Iterator[Any]:
        if self.size is not None and self.size != len(self.iterable):
            raise RuntimeError("dictionary changed size during iteration")  # as Python says
        now = (generators(), [(own, own.get_state()) for own, _ in self.drawn[1]]) if self.drawn else None
        _give_drawn(self.drawn)
        iterator: Iterator[Any] = iter(self.iterable)
        for _ in islice(iterator, self.count):
            pass
        _give_drawn(now)
        return iterator


def over(iterable: Any) -> Any:
    """An equal iterable, whose iterators can be saved where that is known how."""
    if isinstance(iterable, _MADE_ANEW):
        return Position(iterable)
    if isinstance(iterable, io.TextIOWrapper):
        return iter(iterable.readline, "")  # iterating itself it does not tell its position
    if isinstance(iterable, _loader()) and _is_plain(iterable):
        return Position(iterable)
    return iterable


def complaint(iterable: Any, iterator: Any) -> str | None:
    """Why the position of an iteration over this will not be found again, where that is known beforehand."""
    if isinstance(iterator, types.GeneratorType):
        what = "" if iterator is iterable else f" (that of {type(iterable).__name__})"
        return (
            f"a generator{what}, which cannot be saved in progress; make a list of it, or write it as a loop"
        )
    if isinstance(iterable, _loader()) and not _is_plain(iterable):
        return (
            "a DataLoader with an iterable data set or a sampler of its own, whose position cannot be found "
            "again; put the hint behind the loop, or use understudy.data"
        )
    return None


def entered(iterator: Iterator[Any]) -> Iterator[Any]:
    """One round in whose middle the run goes on, then what is left."""
    return chain((None,), iterator)


def is_enterable(manager: Any) -> bool:
    """Whether a context manager does, entered a second time in another process, what it did at first."""
    kind = type(manager)
    return kind in open_files.KINDS or is_enterable_kind(kind)


def is_enterable_kind(kind: type) -> bool:
    return f"{kind.__module__}.{kind.__qualname__}" in _MANAGERS


def generators() -> dict[str, Any]:
    """The states of the generators that everybody shares: of Python, NumPy and PyTorch."""
    found: dict[str, Any] = {"random": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, key, *rest = numpy.random.get_state()
        found["numpy"] = (kind, key.copy(), *rest)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def give_generators(states: dict[str, Any]) -> None:
    random.setstate(states["random"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])


def _drawn_from(loader: Any) -> Any:
    """The states of the generators that an iteration of a loader draws from."""
    holders = (loader, loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    own = {id(each): each for holder in holders if (each := getattr(holder, "generator", None)) is not None}
    return (generators(), [(each, each.get_state()) for each in own.values()])


def _give_drawn(drawn: Any) -> None:
    if drawn is not None:
        give_generators(drawn[0])
        for own, state in drawn[1]:
            own.set_state(state)


def _loader() -> Any:
    data = sys.modules.get("torch.utils.data")
    return data.DataLoader if data is not None else ()


def _is_plain(loader: Any) -> bool:
    data = sys.modules["torch.utils.data"]
    kinds = tuple(getattr(data, name) for name in _SAMPLERS)
    samplers = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    known = all(each is None or type(each) in kinds for each in samplers)
    return known and not isinstance(loader.dataset, data.IterableDataset)
