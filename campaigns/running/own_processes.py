"""The processes that a run has started, wherever they went: each has a variable of ours."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import psutil

MARK = "CAMPAIGN_RUN"
PAUSE_S = 0.02


def marked(mark: str) -> Iterator[psutil.Process]:
    """Those of our user that were started with this mark, zombies left out; not this process."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid == os.getpid() or process.uids().real != os.getuid():
                continue
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def left_after(mark: str, within_s: float) -> list[psutil.Process]:
    """Those that are still there when they have had so long to end.

    One that is just becoming another program shows no environment: nobody is there if two looks say so.
    """
    deadline, before = time.monotonic() + within_s, True
    while ((found := list(marked(mark))) or before) and time.monotonic() < deadline:
        before = bool(found)
        time.sleep(PAUSE_S)
    return found


def kill_all(mark: str) -> None:
    """By force, those too that they start meanwhile."""
    while found := list(marked(mark)):
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, 1)


def described(process: psutil.Process) -> str:
    try:
        return f"process {process.pid}: {' '.join(process.cmdline())[:120]}"
    except psutil.Error:
        return f"process {process.pid}"
