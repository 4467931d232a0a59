"""What makes proxyd stop: SIGTERM and SIGHUP at once; Ctrl-C while ranks run here only the second time."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable


class StopSignals:
    """Handles the stop signals of this process, from now on."""

    def __init__(self, say: Callable[[str], None], running: Callable[[], str]) -> None:
        """`running`: which ranks would end with us, in words; empty: none."""
        self.came = asyncio.Event()
        self._running, self._say = running, say
        self._warned = False
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.came.set)
        loop.add_signal_handler(signal.SIGINT, self._interrupted)

    def _interrupted(self) -> None:
        running = "" if self._warned else self._running()
        if not running:
            self.came.set()
            return
        self._warned = True
        self._say(f"{running}, and would end with it: Ctrl-C once more to stop it all the same")


def account_of_running(jobs: dict[str, int]) -> str:
    """`jobs`: how many ranks of each run here."""
    parts = [f"{ranks} rank{'s' if ranks != 1 else ''} of job {job}" for job, ranks in jobs.items() if ranks]
    if not parts:
        return ""
    verb = "runs" if sum(jobs.values()) == 1 else "run"
    return f"{' and '.join(parts)} {verb} under this proxyd"
