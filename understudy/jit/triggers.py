"""What asks for a save besides the watchdog: an exception that ends the script, and SIGTERM.

A signal's Python handler runs in the main thread, and only when that comes back from C. A main thread that
hangs in a collective does not; so a thread is told of the signal as well, by the file descriptor that the C
handler writes to, and takes the signal over when the main thread has not.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
from _signal import getsignal  # type: ignore[import-not-found]  # the public one is far slower
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Protocol

MAIN_THREAD_HAS = 0.5
"""Seconds to come to the signal's handler."""
_END = b"\0"


class Saver(Protocol):
    """What the triggers call."""

    def on_exception(self, kind: type[BaseException], error: BaseException) -> None:
        """In the main thread, before the traceback is printed."""

    def on_sigterm(self) -> bool:
        """In the main thread. Does not return if it saves; False: nothing will be saved."""

    def on_sigterm_unhandled(self) -> None:
        """In a thread: the main thread has not come to its handler."""


class Exceptions:
    """`sys.excepthook`, in front of the one that is there."""

    def __init__(self, saver: Saver) -> None:
        self._saver = saver
        self._previous: Callable[..., Any] = sys.excepthook

    def install(self) -> None:
        self._previous, self._hook = sys.excepthook, self._called
        sys.excepthook = self._hook

    def remove(self) -> None:
        """A hook that somebody has put in front of this one stays, and finds that there is nothing to do."""
        if sys.excepthook is self._hook:
            sys.excepthook = self._previous
        self._saver = _Nobody()

    def _called(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        try:
            if issubclass(kind, Exception):  # neither KeyboardInterrupt nor SystemExit
                self._saver.on_exception(kind, error)
        finally:
            self._previous(kind, error, traceback)


class Sigterm:
    """SIGTERM's handler, and the thread that hears of it too. Made and removed by the main thread."""

    def __init__(self, saver: Saver) -> None:
        self._saver: Saver = saver
        self._previous: Any = signal.SIG_DFL
        self._descriptor_before = -1
        self._handled = threading.Event()
        self._inside = False
        self._installed = False

    def install(self) -> bool:
        """False where SIGTERM is ignored or handled by a library in C: then that stays so."""
        self._previous = signal.getsignal(signal.SIGTERM)
        if self._previous in (signal.SIG_IGN, None) or not _is_main_thread():
            return False
        self._hears, self._tells = socket.socketpair()
        self._tells.setblocking(False)
        self._handler = self._called
        signal.signal(signal.SIGTERM, self._handler)
        self._installed = True
        self._listen()
        self._thread = threading.Thread(target=self._run, name="understudy-sigterm", daemon=True)
        self._thread.start()
        return True

    def renew(self) -> None:
        """Where the script, or asyncio, has put its own in place of these, they go in front of it again."""
        if not self._installed or not _is_main_thread():
            return
        if getsignal(signal.SIGTERM) is not self._handler:
            if (now := signal.getsignal(signal.SIGTERM)) in (signal.SIG_IGN, None):
                return
            self._previous = now
            signal.signal(signal.SIGTERM, self._handler)
        self._listen()

    def interrupt(self) -> None:
        """Let the main thread come to the handler as soon as it is back from C. Called by any thread."""
        if self._installed and signal.getsignal(signal.SIGTERM) is self._handler:
            import _thread

            _thread.interrupt_main(signal.SIGTERM)

    def remove(self) -> None:
        if not self._installed:
            return
        self._restore()
        self._saver = _Nobody()
        self._handled.set()
        with contextlib.suppress(OSError):
            self._tells.send(_END)
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)
        self._close()

    def forget_in_child(self) -> None:
        """Behind a fork: the thread is not there, and the descriptors are the parent's."""
        if self._installed:
            self._restore()
            self._saver = _Nobody()
            self._close()

    def call_previous(self, frame: FrameType | None) -> None:
        """What would have happened without this handler."""
        if callable(self._previous):
            self._previous(signal.SIGTERM, frame)
        else:
            end_by_sigterm()

    @property
    def has_previous(self) -> bool:
        """Whether the script has a handler of its own."""
        return callable(self._previous)

    def _called(self, _: int, frame: FrameType | None) -> None:
        self._handled.set()
        if self._inside:  # a handler of the script calls the one that it has found, which is this one
            return
        if not self._saver.on_sigterm():
            self._inside = True
            try:
                self.call_previous(frame)
            finally:
                self._inside = False

    def _listen(self) -> None:
        before = signal.set_wakeup_fd(self._tells.fileno(), warn_on_full_buffer=False)
        if before != self._tells.fileno():
            self._descriptor_before = before

    def _run(self) -> None:
        while True:
            try:
                heard = self._hears.recv(1)
            except OSError:
                return
            if heard in (_END, b""):
                return
            if self._descriptor_before >= 0:
                with contextlib.suppress(OSError):
                    os.write(self._descriptor_before, heard)
            if heard[0] == signal.SIGTERM:
                handled = self._handled.wait(MAIN_THREAD_HAS)
                self._handled.clear()
                if not handled:
                    self._saver.on_sigterm_unhandled()

    def _restore(self) -> None:
        self._installed = False
        with contextlib.suppress(ValueError, OSError):  # not in the main thread; a descriptor that is closed
            if signal.getsignal(signal.SIGTERM) is self._handler:
                signal.signal(signal.SIGTERM, self._previous)
            now = signal.set_wakeup_fd(-1)
            signal.set_wakeup_fd(self._descriptor_before if now == self._tells.fileno() else now)

    def _close(self) -> None:
        self._hears.close()
        self._tells.close()


class _Nobody:
    """Behind `remove`."""

    def on_exception(self, kind: type[BaseException], error: BaseException) -> None:
        pass

    def on_sigterm(self) -> bool:
        return False

    def on_sigterm_unhandled(self) -> None:
        pass


def ignore_ends_of_children() -> None:
    """PyTorch's handler of SIGCHLD raises, amid a save, when the launcher ends a loader's workers as well."""
    if _is_main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def end_by_sigterm() -> None:
    """As if nobody had handled the signal: whoever waits for this process sees that it was SIGTERM (143)."""
    flush()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).signal(int(signal.SIGTERM), None)  # signal.signal works in the main thread alone
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(1.0)
    os._exit(128 + signal.SIGTERM)


def end_with(status: int) -> None:
    """At once, from any thread. What the script has printed is not lost."""
    flush()
    os._exit(status)


def flush() -> None:
    """Of stdout and stderr, by a thread: one that hangs may hold their locks."""

    def both() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()

    thread = threading.Thread(target=both, daemon=True)
    thread.start()
    thread.join(1.0)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
