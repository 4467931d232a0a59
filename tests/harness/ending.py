"""How a fork of a zygote ends: as Python does, without taking the interpreter down.

To take it down is to free each object of PyTorch, and by that to copy each page that the fork shares with
its zygote: a third of what a run of two ranks cost. All that a program can arrange for its end happens:
threads are waited for, what is registered with `atexit` is called, streams are flushed. What destructors do
behind that is tested by the processes that start anew, and in one test of eight, which sets
UNDERSTUDY_TEST_WHOLE_END.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

WHOLE_END = "UNDERSTUDY_TEST_WHOLE_END"
WHOLE_END_EVERY = 8
"""Of so many tests, and random programs, one has it set."""
FLUSH_FAILED = 120
"""Python's own status for output that it could not write at its end."""


def run(program: Callable[[], None], harness: str) -> None:
    """Run `program` and end the process; frames of files below `harness` are in no traceback.

    Returns, or raises what `program` raises, where the interpreter is to be taken down.
    """
    if os.environ.get(WHOLE_END):
        program()
        return
    interrupted = False
    try:
        program()
        status = 0
    except SystemExit as ended:
        status = _status(ended.code)
    except BaseException as error:  # noqa: BLE001 - as the interpreter does
        interrupted = isinstance(error, KeyboardInterrupt)
        status = 1
        error = error.with_traceback(_behind(error.__traceback__, harness))
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError as error:
            status = FLUSH_FAILED
            if stream is not sys.stderr:
                print(f"Exception ignored in: {stream!r}\n{type(error).__name__}: {error}", file=sys.stderr)
    ctypes.CDLL(None).fflush(None)
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


def _status(code: Any) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _behind(traceback: TracebackType | None, harness: str) -> TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(harness):
        traceback = traceback.tb_next
    return traceback
