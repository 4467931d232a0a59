"""When a checkpoint is written: before the training goes on, or beside it (paper 002 §4.4)."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from .checkpoint_files import CheckpointError


@dataclass(frozen=True)
class Blocking:
    """The training waits until the checkpoint is durable."""

    name = "blocking"


@dataclass(frozen=True)
class Overlapped:
    """The training waits until the state is copied; a thread writes it. Its copies take memory of the host.

    `max_in_flight`: checkpoints that are copied and not durable yet; with so many, the next one waits for
    room.
    """

    max_in_flight: int = 4
    name = "overlapped"

    def __post_init__(self) -> None:
        if self.max_in_flight < 1:
            raise ValueError(f"max_in_flight is {self.max_in_flight}; it must be at least 1.")


Strategy = Blocking | Overlapped
blocking = Blocking()


def overlapped(max_in_flight: int = 4) -> Overlapped:
    """The paper's name and number for `Overlapped`."""
    return Overlapped(max_in_flight)


class Writer:
    """A thread that carries out what it is handed, in that order, and keeps the first error for whoever asks.

    It ends with `close`, which waits for all of it; the interpreter's exit closes what nobody has closed.
    After an error it goes on: a checkpoint behind one that was lost still saves work.
    """

    def __init__(self, most: int) -> None:
        self._room = threading.Semaphore(most)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._owner = os.getpid()
        self._closed = False
        # A daemon, else the interpreter would wait for it before it calls what atexit has, which ends it.
        self._thread = threading.Thread(target=self._run, name="understudy-checkpoints", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def error(self) -> BaseException | None:
        """What went wrong first, until `raise_error` has raised it."""
        return self._error

    def enqueue(self, work: Callable[[], None]) -> float:
        """Returns the seconds that it waited for room."""
        begin = time.perf_counter()
        self._room.acquire()
        waited = time.perf_counter() - begin
        self._work.put(work)
        return waited

    def raise_error(self) -> None:
        """Raise what went wrong, once."""
        if (error := self._error) is not None:
            self._error = None
            raise CheckpointError(f"A checkpoint that was being written is lost: {error}") from error

    def close(self) -> None:
        """Wait until all that was handed over is carried out; raise what went wrong with it."""
        if os.getpid() != self._owner:  # a fork has no such thread
            return
        if not self._closed:
            self._closed = True
            atexit.unregister(self.close)
            self._work.put(None)
            self._thread.join()
        self.raise_error()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - it is raised where the training is, at its next call
                self._error = self._error or error
            finally:
                self._room.release()
                del work  # and with it the copies, before waiting for the next one
