"""Where the script is in its data: noted as a DataLoader is iterated, told with a snapshot's description.

Nothing of a loader is changed, and no sampler is asked but ours (understudy.data): anybody else's may do
anything.  PyTorch itself counts the batches that an iterator has handed out.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from types import ModuleType
from typing import Any

_count = itertools.count()


class _Iterated:
    """A loader that was iterated: as the how-manieth, how often, and its newest iterator."""

    def __init__(self) -> None:
        self.number = next(_count)
        self.times = 0
        self.newest: weakref.ref[Any] | None = None


_loaders: weakref.WeakKeyDictionary[Any, _Iterated] = weakref.WeakKeyDictionary()


def install(dataloader: ModuleType) -> None:
    """Once `torch.utils.data.dataloader` is there."""
    loader_class: Any = dataloader.DataLoader
    iterate = loader_class.__iter__

    @functools.wraps(iterate)
    def __iter__(self: Any) -> Any:
        iterator = iterate(self)
        with contextlib.suppress(TypeError):  # a subclass that cannot be hashed, or referred to weakly
            if self not in _loaders:
                _loaders[self] = _Iterated()
            known = _loaders[self]
            known.times += 1
            known.newest = weakref.ref(iterator)
        return iterator

    loader_class.__iter__ = __iter__
    _noting.add(__iter__)


_noting: set[Any] = set()
"""Our __iter__: a loader whose class has another one may read ahead of its script."""


def positions() -> list[dict[str, Any]]:
    """Of each loader that is still there, in the order in which they were first iterated.

    `iterations`: how often it was begun, epochs mostly; `batches`: that the newest one has handed out.
    """
    found = sorted(list(_loaders.items()), key=lambda item: item[1].number)
    return [_position(loader, known) for loader, known in found]


def _position(loader: Any, known: _Iterated) -> dict[str, Any]:
    iterator = known.newest() if known.newest is not None else None
    kind = type(loader)
    return {
        "loader": known.number,
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "iterations": known.times,
        "batches": getattr(iterator, "_num_yielded", None),
        "batch_size": loader.batch_size if isinstance(loader.batch_size, int) else None,
        "may_read_ahead": kind.__iter__ not in _noting,
        "sampler": _sampler_state(loader),
    }


def _sampler_state(loader: Any) -> dict[str, Any] | None:
    sampler: Any
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if type(sampler).__module__ == "understudy.data.sampler":
            state: dict[str, Any] = sampler.state_dict()
            return state
    return None
