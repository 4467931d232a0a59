"""What a device server does when proxyd dies: its work goes on, until its job is gone too.

Without a session it ends at once.  With one it outlives proxyd, because a successor may adopt it
(recovery/takeover/adoption.py); once the worker has ended as well it waits for one no longer than the grace.
The last server to leave removes the runtime directory: nothing may be left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from understudy.replay import process_is_alive

LOOK_S = 0.5
"""How often an orphan looks whether its worker lives."""
LOCK_S, LOCK_PAUSE_S = 5.0, 0.01
"""How long, and in which steps, the lock of the runtime directory is tried for."""
ALIVE = "alive"
"""File in the runtime directory of which every living server holds a shared lock."""


@dataclass(frozen=True)
class Identity:
    """A process; a reused pid has another start (field 22 of /proc/PID/stat)."""

    pid: int
    start_ticks: int

    def is_alive(self) -> bool:
        """Whether this very process runs."""
        return process_is_alive(self.pid, self.start_ticks)


@dataclass(frozen=True)
class Charge:
    """The session that a server works for."""

    worker: Identity
    directory: Path


class Guardian:
    """Ends this process, and cleans up behind it, when neither proxyd nor its job needs it any more."""

    def __init__(self, socket: Path, proxyd: Identity, grace_s: float) -> None:
        """`socket`: of this server, in proxyd's runtime directory."""
        self._socket = socket
        self._runtime = socket.parent
        self._proxyd = proxyd
        self._grace_s = grace_s
        self._charge: Charge | None = None
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._alive = os.open(
            self._runtime / ALIVE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        fcntl.flock(self._alive, fcntl.LOCK_SH)
        threading.Thread(target=self._watch, name="guardian", daemon=True).start()

    def follow(self, proxyd: Identity) -> None:
        """A successor has come."""
        self._proxyd = proxyd
        os.eventfd_write(self._woken, 1)

    def work_for(self, charge: Charge) -> None:
        """A session begins."""
        self._charge = charge

    def follow_worker(self, worker: Identity) -> None:
        """The session's worker was moved."""
        if self._charge is not None:
            self._charge = Charge(worker, self._charge.directory)

    def _watch(self) -> NoReturn:
        alone_since: float | None = None
        while True:
            proxyd, charge = self._proxyd, self._charge
            if proxyd.is_alive():
                alone_since = None
                self._until_it_ends(proxyd)
                continue
            if charge is None:
                self._leave(None)
            if charge.worker.is_alive():
                alone_since = None
            elif alone_since is None:
                alone_since = time.monotonic()
            elif time.monotonic() - alone_since >= self._grace_s:
                self._leave(charge)
            self._sleep([], LOOK_S)

    def _until_it_ends(self, proxyd: Identity) -> None:
        """Or until another one is to be followed."""
        try:
            handle = os.pidfd_open(proxyd.pid)
        except ProcessLookupError:
            return
        try:
            if proxyd.is_alive():  # the handle is of this very process
                self._sleep([handle], None)
        finally:
            os.close(handle)

    def _sleep(self, handles: list[int], timeout_s: float | None) -> None:
        waiting = select.poll()
        for handle in (self._woken, *handles):
            waiting.register(handle, select.POLLIN)
        waiting.poll(None if timeout_s is None else 1000 * timeout_s)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._woken)

    def _leave(self, charge: Charge | None) -> NoReturn:
        with contextlib.suppress(OSError):
            self._socket.unlink(missing_ok=True)
            if charge is not None:
                with self._lock_of_runtime():
                    self._remove(charge)
        os._exit(0)

    def _remove(self, charge: Charge) -> None:
        shutil.rmtree(charge.directory, ignore_errors=True)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self._runtime, ignore_errors=True)

    @contextlib.contextmanager
    def _lock_of_runtime(self) -> Iterator[None]:
        """Held by a proxyd that is alive, which cleans up itself: BlockingIOError then."""
        lock = os.open(self._runtime, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(LOCK_PAUSE_S)  # another server leaves too
        yield
