"""Which indices are in the batch that a DataLoader's iterator hands out, whatever was read ahead.

An iterator draws indices as it sends tasks to its workers, and hands batches out later: each draw is kept
under the number of its task until that task's batch goes to whoever iterates.  Nothing of a loader is changed
but that its iterators are watched; who iterates in a way of its own is dealt with in `own_iteration`.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from understudy.proxy_client.samples import lines, sampling
from understudy.proxy_client.samples.recorder import Recorder

ALONE = -1
"""The task of an iterator without workers."""
_DRAWN, _ITERATION = "_understudy_drawn", "_understudy_iteration"


class Inner(threading.local):
    """What a thread's innermost loader of another class has had from PyTorch's iterators, and keeps."""

    had: list[tuple[Any, Any]] | None = None
    """(batch, what its sampler yielded), oldest first; None: the script itself asks."""


inner = Inner()


class Iteration:
    """One time that a loader is gone through."""

    def __init__(self, number: int, epoch: int, step: int, is_batch: bool) -> None:
        self.number, self.epoch, self.step, self.is_batch = number, epoch, step, is_batch


class Loaders:
    """Those that were iterated, by number, in the order in which they first were."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._known: dict[int, tuple[weakref.ref[Any], int, int]] = {}
        """By identity, as a script's own may be one that cannot be hashed: number, and times so far."""
        self._count = 0

    @property
    def any(self) -> bool:
        """Whether there was one yet."""
        return self._count > 0

    def begin(self, loader: Any) -> Iteration:
        """It is gone through once more."""
        key = id(loader)
        known = self._known.get(key)
        if known is None:
            number, times = self._count, 0
            self._count += 1
            facts = sampling.facts_of(loader)
            self._recorder.note(_introducing(number, facts))
            reference = weakref.ref(loader, lambda _: self._known.pop(key, None))
        else:
            reference, number, times = known
        self._known[key] = (reference, number, times + 1)
        sampler = sampling.resumable_sampler(list(sampling.samplers_of(loader)))
        is_batch = getattr(loader, "batch_sampler", None) is not None
        if sampler is None:
            return Iteration(number, times, 0, is_batch)
        return Iteration(number, sampler.epoch, sampler.cursor_step, is_batch)

    def handed(self, iteration: Iteration, index: Any, why: str = "") -> None:
        """A batch of it went to the script; `why` its `index` is not known, if so."""
        ids = None if why or index is None else lines.ids_of(index, iteration.is_batch)
        if ids is None or None in ids:
            ids = None
            self._recorder.tell_once(
                f"the batches of loader {iteration.number} are known by their content alone: "
                f"{why or _why_unknown(index)}"
            )
        number, epoch, step = iteration.number, iteration.epoch, iteration.step
        iteration.step += 1
        self._recorder.note(lambda line: lines.batch(line, number, epoch, step, ids))


def _introducing(number: int, facts: dict[str, Any]) -> Callable[[int], str]:
    def line(place: int) -> str:
        return lines.loader(place, number, facts)

    line.introduces = True  # type: ignore[attr-defined]
    return line


def _why_unknown(index: Any) -> str:
    if index is None or (type(index) is list and set(index) == {None}):
        return "its data set is an iterable one, which has no indices"
    return f"its sampler yields neither numbers nor texts ({type(index).__name__})"


def install(dataloader: ModuleType, recorder: Recorder, loaders: Loaders) -> None:
    """Once `torch.utils.data.dataloader` is there."""
    base: Any = dataloader._BaseDataLoaderIter
    next_index, reset, advance = base._next_index, base._reset, base.__next__
    iterate = dataloader.DataLoader.__iter__

    @functools.wraps(next_index)
    def _next_index(self: Any) -> Any:
        index = next_index(self)
        state = self.__dict__
        state.setdefault(_DRAWN, {})[state.get("_send_idx", ALONE)] = index
        return index

    @functools.wraps(reset)
    def _reset(self: Any, *arguments: Any, **named: Any) -> Any:
        self.__dict__[_DRAWN] = {}
        return reset(self, *arguments, **named)

    @functools.wraps(advance)
    def __next__(self: Any) -> Any:
        try:
            batch = advance(self)
        except BaseException:
            _drawn_of(self)  # a task that failed is none that is waited for
            raise
        guarded(recorder, lambda: _handed_out(loaders, self, batch))
        return batch

    @functools.wraps(iterate)
    def __iter__(self: Any) -> Any:
        iterator = iterate(self)
        if inner.had is None:
            guarded(recorder, lambda: iterator.__dict__.update({_ITERATION: loaders.begin(self)}))
        return iterator

    base._next_index, base._reset, base.__next__ = _next_index, _reset, __next__
    dataloader.DataLoader.__iter__ = __iter__  # type: ignore[attr-defined]


def guarded(recorder: Recorder, work: Callable[[], object]) -> None:
    """Loaders and samplers are anybody's: what goes wrong with them ends the record, and no more."""
    try:
        work()
    except Exception as problem:  # noqa: BLE001
        recorder.stop(f"the samples are not recorded any more: {problem!r}")


def _handed_out(loaders: Loaders, iterator: Any, batch: Any) -> None:
    index = _drawn_of(iterator)
    if inner.had is not None:
        inner.had.append((batch, index))
        return
    iteration = iterator.__dict__.get(_ITERATION)
    if iteration is not None:
        loaders.handed(iteration, index)


def _drawn_of(iterator: Any) -> Any:
    """What was drawn for the task that has just ended, which is forgotten."""
    state = iterator.__dict__
    drawn = state.get(_DRAWN)
    if not drawn:
        return None
    tasks = state.get("_task_info")
    if tasks is None:
        return drawn.pop(ALONE, None)
    sent = state["_send_idx"]
    ended = [task for task in drawn if task not in tasks and task < sent]
    found = None
    for task in ended:
        found = drawn.pop(task)
    return found
