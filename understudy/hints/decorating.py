"""The decorator and the hint."""

from __future__ import annotations

import functools
import inspect
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, cast

from . import source
from .cost import Cost
from .files import Folder
from .rewriting import rewrite
from .running import Plan, Run, Settings
from .source import HintError, where
from .surroundings import Shared, say_once

P = ParamSpec("P")
T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R")


class Resumable(Protocol[P, T_co]):
    """A decorated function; `source` is what it was rewritten into."""

    source: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co: ...


def checkpoint() -> None:
    """A hint: the decorated function may be cut here, and go on here (the paper's `_checkpoint()`).

    Whether a checkpoint is taken is decided as the function runs. Outside a decorated function it does
    nothing, and says so once.
    """
    hint_without_decorator()


def checkpoints(
    *,
    overhead: float = 0.03,
    failure_rate: float = 1 / 3600,
    directory: str | os.PathLike[str] = "run",
    hints: Literal["explicit", "auto"] = "explicit",
    cost: Cost = "exact",
    every: int | None = None,
) -> Callable[[Callable[P, R]], Resumable[P, R]]:
    """Make a function resumable: called again with equal arguments, it goes on behind its newest checkpoint.

    `overhead`: seconds of checkpoints per second of the function, at most (the paper's
    `schedule_checkpoints(allowance=)`). `failure_rate`: failures per second. `directory`: where checkpoints
    lie, one for each process; those of a call are removed when it returns. `hints="auto"` proposes places at
    the ends of loop bodies (paper §5.3.1). `cost`: of a block between two checkpoints, "exact" or as in
    the "paper" (§2.1). `every`: take each how-manieth hint, whatever it costs.

    What a checkpoint holds: the variables that may be read behind the hint, what the caller shares with the
    function (arguments, globals that it uses), and the states of the generators of Python, NumPy, PyTorch.
    Raises HintError, in one sentence, for what cannot be resumed: at decoration where it is evident, else
    at the first hint.
    """
    settings = _settings(overhead, failure_rate, directory, hints, cost, every)

    def decorate(function: Callable[P, R]) -> Resumable[P, R]:
        found = source.read(function, checkpoint, settings.auto)
        rewritten = rewrite(found)
        decorated = Decorated(Plan(found, rewritten, settings))

        @functools.wraps(function)
        def resumable(*args: P.args, **kwargs: P.kwargs) -> R:
            return cast(R, decorated(*args, **kwargs))

        resumable.source = rewritten.text  # type: ignore[attr-defined]
        return cast(Resumable[P, R], resumable)

    return decorate


class Decorated:
    """A function that can be resumed, and the calls of it."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.function = plan, plan.function
        self.signature = inspect.signature(self.function)
        self.completed: dict[str, int] = {}
        self._busy = threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if current() is not None:
            return self._inside_another(args, kwargs)
        if not self._busy.acquire(blocking=False):
            raise HintError(
                f"{where(self.function)} is being run by another thread; call it again when that is over."
            )
        try:
            return self._call(args, kwargs)
        finally:
            self._busy.release()

    def _inside_another(self, args: Any, kwargs: Any) -> Any:
        say_once(
            f"{where(self.function)} is called inside {current()}, whose checkpoints cover it: its own hints "
            "do nothing there."
        )
        _here.nested += 1
        try:
            return self.function(*args, **kwargs)
        finally:
            _here.nested -= 1

    def _call(self, args: Any, kwargs: Any) -> Any:
        shared = Shared(self.function, self.signature, args, kwargs)
        count = self.completed.get(shared.digest, 0)
        name = f"{self.function.__name__}-{shared.key(count)}"
        folder = Folder(self.plan.settings.directory.absolute() / name)
        owner = os.getpid()
        try:
            run = Run(self.plan, shared, folder)
            result = self._run(run, args, kwargs)
        except BaseException:
            folder.release()
            raise
        if os.getpid() == owner:
            folder.remove()
            self.completed[shared.digest] = count + 1
        return result

    def _run(self, run: Run, args: Any, kwargs: Any) -> Any:
        _here.run = run
        try:
            return run.function()(*args, **kwargs)
        except BaseException as error:
            run.ended_by(error)
            raise
        finally:
            _here.run = None


class _Here(threading.local):
    """What the running thread is in the middle of."""

    run: Run | None = None
    nested: int = 0


_here = _Here()


def current() -> str | None:
    """The function that this thread is running with checkpoints, if any."""
    return None if _here.run is None else where(_here.run.plan.function)


def hint_without_decorator() -> None:
    """A call of checkpoint() itself: no decorator has put something in its place."""
    if not _here.nested:
        say_once(
            "checkpoint() was called outside a function that is decorated with @checkpoints, where it does "
            "nothing."
        )


def _settings(
    overhead: float, failure_rate: float, directory: Any, hints: str, cost: Any, every: int | None
) -> Settings:
    for name, value in (("overhead", overhead), ("failure_rate", failure_rate)):
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"{name} is {value!r}; it must be a number above 0.")
    if hints not in ("explicit", "auto"):
        raise ValueError(f'hints is {hints!r}; it must be "explicit" or "auto".')
    if cost not in ("exact", "paper"):
        raise ValueError(f'cost is {cost!r}; it must be "exact" or "paper".')
    if every is not None and (type(every) is not int or every < 1):
        raise ValueError(f"every is {every!r}; it must be a whole number from 1 on.")
    return Settings(overhead, failure_rate, Path(directory), cost, every, hints == "auto")
