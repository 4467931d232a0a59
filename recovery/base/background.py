"""Tasks that nobody awaits: kept alive, failures logged, cancelled together; and some that are one step."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import structlog

from understudy.recovery.base.timing import TIMING, Timing

log = structlog.get_logger()

Value = TypeVar("Value")


class BackgroundTasks:
    """The background tasks of one owner, named in the log by `owner`."""

    def __init__(self, owner: str, timing: Timing = TIMING) -> None:
        self._owner, self._timing = owner, timing
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run it beside everything else."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    async def cancel(self) -> None:
        """Cancel all and wait until they have ended.

        Again and again: asyncio.wait_for of Python 3.11 forgets a cancellation that comes as its wait ends.
        """
        pending = set(self._tasks)
        while pending:
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=self._timing.cancel_again_s)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a background task failed", owner=self._owner, exc_info=task.exception())


class Complaints:
    """Keeps a loop going whatever happens: trouble of one kind at one place is logged once."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._told: set[tuple[str, type[Exception], int]] = set()

    @contextmanager
    def survived(self, subject: str = "") -> Iterator[None]:
        """What fails in this block, about `subject`, does not end the loop around it."""
        try:
            yield
        except Exception as problem:
            *_, (frame, line) = traceback.walk_tb(problem.__traceback__)
            trouble = (f"{subject} {frame.f_code.co_filename}", type(problem), line)
            if trouble not in self._told:  # the message may be another one each time
                self._told.add(trouble)
                log.error("a look failed", owner=self._owner, subject=subject, exc_info=problem)


async def all_of(works: Iterable[Coroutine[Any, Any, Value]]) -> list[Value]:
    """All at once; the first failure cancels the others.  Everything happens in the order of `works`.

    A TaskGroup keeps its tasks in a set: in which order it cancels them changes from run to run.
    """
    tasks = [asyncio.create_task(work) for work in works]
    if not tasks:
        return []
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        # Of those that have failed as well: asyncio complains of an exception that nobody has looked at.
        await asyncio.gather(*tasks, return_exceptions=True)
    failures = [task.exception() for task in tasks if not task.cancelled()]
    for failure in failures:
        if failure is not None:
            raise failure
    return [task.result() for task in tasks]


async def to_its_end(work: Coroutine[Any, Any, Value]) -> Value:
    """What comes of work that goes on if nobody waits any more; then nobody hears how it failed."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(task)


async def first_of(*events: asyncio.Event) -> None:
    """Until one of them is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
