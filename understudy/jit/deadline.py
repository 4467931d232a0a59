"""Something that is done if another thing takes too long."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Deadline:
    """Calls `late`, in a thread, if nobody cancels it in time."""

    def __init__(self, seconds: float, late: Callable[[], None]) -> None:
        self._cancelled = threading.Event()
        self._seconds, self._late = seconds, late
        threading.Thread(target=self._wait, name="understudy-deadline", daemon=True).start()

    def cancel(self) -> None:
        self._cancelled.set()

    def _wait(self) -> None:
        if not self._cancelled.wait(self._seconds):
            self._late()
