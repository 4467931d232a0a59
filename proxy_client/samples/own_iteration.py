"""Loaders that iterate in a way of their own: they may read ahead, leave out, or make batches anew.

What such a loader has from PyTorch's iterators is held back until it yields.  A batch that it hands on as it
is has its indices; so has that of a class that is known to keep the order (accelerate's).  What any other
class yields is known by its content alone, and the user is told once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from understudy.proxy_client.samples.drawing import Iteration, Loaders, guarded, inner
from understudy.proxy_client.samples.recorder import Recorder
from understudy.proxy_client.samples.sampling import name_of

IN_ORDER = "accelerate.data_loader.DataLoaderShard"
"""It reads one batch ahead, moves each to the device, and leaves out the first `skip_batches`."""
OF_ACCELERATE = ("DataLoaderShard", "DataLoaderDispatcher", "SkipDataLoader")
"""They are no subclasses of DataLoader, though they say so."""


def install(dataloader: ModuleType, recorder: Recorder, loaders: Loaders) -> None:
    """Watch subclasses of DataLoader as they are made."""
    loader_class: Any = dataloader.DataLoader
    inherited = loader_class.__init_subclass__

    def __init_subclass__(cls: type, **named: Any) -> None:
        inherited.__func__(cls, **named)
        watch(cls, dataloader, recorder, loaders)

    loader_class.__init_subclass__ = classmethod(__init_subclass__)


def install_in_accelerate(
    module: ModuleType, dataloader: ModuleType, recorder: Recorder, loaders: Loaders
) -> None:
    """Once `accelerate.data_loader` is there."""
    for name in OF_ACCELERATE:
        if isinstance(kind := getattr(module, name, None), type):
            watch(kind, dataloader, recorder, loaders)


def watch(kind: type, dataloader: ModuleType, recorder: Recorder, loaders: Loaders) -> None:
    """If the class has an `__iter__` of its own."""
    own: Callable[[Any], Any] | None = kind.__dict__.get("__iter__")
    if own is None:
        return

    @functools.wraps(own)
    def __iter__(self: Any) -> Any:
        if inner.had is not None:  # of a class that is derived from this one
            return own(self)
        had: list[tuple[Any, Any]] = []
        result = _within(had, lambda: own(self))
        if isinstance(result, dataloader._BaseDataLoaderIter):  # it only calls PyTorch's
            guarded(recorder, lambda: result.__dict__.update(_understudy_iteration=loaders.begin(self)))
            return result
        return Watched(iter(result), had, self, recorder, loaders)

    kind.__iter__ = __iter__  # type: ignore[attr-defined]


class Watched:
    """An iterator of such a loader; whatever else is asked of it, the loader's own answers."""

    def __init__(
        self, of: Any, had: list[tuple[Any, Any]], loader: Any, recorder: Recorder, loaders: Loaders
    ) -> None:
        self._of, self._had, self._loader = of, had, loader
        self._recorder, self._loaders = recorder, loaders
        self._iteration: Iteration | None = None
        self._name = name_of(type(loader))

    def __iter__(self) -> Watched:
        return self

    def __next__(self) -> Any:
        if self._iteration is None:
            guarded(self._recorder, self._begin)
        batch = _within(self._had, lambda: next(self._of))
        guarded(self._recorder, lambda: self._hand_out(batch))
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def _begin(self) -> None:
        self._iteration = self._loaders.begin(self._loader)
        self._left_out = self._loader.skip_batches if self._name == IN_ORDER else 0

    def _hand_out(self, batch: Any) -> None:
        if self._iteration is None:
            return
        had = self._had
        place = next((place for place, (one, _) in enumerate(had) if one is batch), None)
        if place is None and self._name == IN_ORDER:
            place, self._left_out = self._left_out, 0
        if place is None or place >= len(had):
            del had[:]
            why = f"its class {self._name} iterates in a way of its own, and hands on other objects"
            self._loaders.handed(self._iteration, None, why)
            return
        self._left_out = 0
        index = had[place][1]
        del had[: place + 1]
        self._loaders.handed(self._iteration, index)


def _within(had: list[tuple[Any, Any]], work: Callable[[], Any]) -> Any:
    before, inner.had = inner.had, had
    try:
        return work()
    finally:
        inner.had = before
