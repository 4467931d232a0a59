"""Several proxyds in one virtual event loop: each can die between any two steps of its tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any

from simulation.virtual_time import VirtualLoop

LIFE: ContextVar[Life | None] = ContextVar("LIFE", default=None)
"""Whose step runs; None: the world's."""
TURNS_AT_END = 200


class Life:
    """A proxyd from its start to its death: what it had begun stops for good, `finally` included."""

    def __init__(self, loop: HostsLoop, host: str) -> None:
        self.host = host
        self.alive = True
        self.steps_left = -1
        """It dies before that many more steps; negative: not by itself."""
        self.on_death: list[Callable[[], None]] = []
        self._loop = loop
        loop.lives.append(self)
        self.frozen: list[tuple[Callable[..., Any], tuple[Any, ...], Context]] = []
        """Steps that it did not come to."""
        self._tasks: list[asyncio.Task[Any]] = []

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something as this proxyd does."""
        context = Context()
        context.run(LIFE.set, self)
        return context.run(self._loop.create_task, work)

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Until the world is over: a task that were collected would run its `finally`."""
        if len(self._tasks) > 256:
            self._tasks = [one for one in self._tasks if not one.done()]
        self._tasks.append(task)

    def may_step(self, callback: Callable[..., Any], arguments: tuple[Any, ...]) -> bool:
        """Whether it still runs."""
        if self.alive and self.steps_left >= 0:
            self.steps_left -= 1
            if self.steps_left < 0:
                self.die()
        if not self.alive:
            self.frozen.append((callback, arguments, copy_context()))
        return self.alive

    def die(self) -> None:
        """As by SIGKILL."""
        if self.alive:
            self.alive = False
            for told in self.on_death:
                self._loop.outside(0.0, told)


class HostsLoop(VirtualLoop):
    """The virtual loop, which knows whose steps it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.over = False
        """The schedule has ended: whoever is left ends too, and nobody looks."""
        self.lives: list[Life] = []
        self._outside = Context()
        self.set_task_factory(_make_task)

    def outside(self, seconds: float, callback: Callable[..., Any], *arguments: Any) -> asyncio.TimerHandle:
        """Something that happens whoever lives."""
        return self.call_later(seconds, callback, *arguments, context=self._outside)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        context = copy_context() if context is None else context
        return super().call_soon(self._step, callback, args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        context = copy_context() if context is None else context
        return super().call_at(when, self._step, callback, args, context=context)

    def _step(self, callback: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        life = LIFE.get()
        if life is None or self.over or life.may_step(callback, arguments):
            callback(*arguments)


def _make_task(loop: asyncio.AbstractEventLoop, work: Any, context: Context | None = None) -> Any:
    task = asyncio.Task(work, loop=loop, context=context)
    life = LIFE.get()
    if life is not None:
        life.keep(task)
    return task


def run(main: Coroutine[Any, Any, None], loop: HostsLoop) -> None:
    """Run until `main` is over, then end what it left behind."""
    loop.set_exception_handler(lambda *_: None)
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(main)
    finally:
        loop.over = True
        for life in loop.lives:
            for callback, arguments, context in life.frozen:
                loop.call_soon(callback, *arguments, context=context)
        for _ in range(TURNS_AT_END):
            left = asyncio.all_tasks(loop)
            if not left:
                break
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.wait(left, timeout=1.0))
        asyncio.set_event_loop(None)
        loop.close()
