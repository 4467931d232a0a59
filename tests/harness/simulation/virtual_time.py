"""An event loop without a clock: it jumps to the next timer, so that a minute costs microseconds."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

MOST_TURNS = 2_000_000
"""Turns of the loop after which a run counts as endless."""


class Stalled(AssertionError):
    """Nothing is left that could ever happen, yet the run is not over."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Timers and callbacks only: nothing outside the process can wake it, so every run is repeatable."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._turns = 0
        self._selector = self  # BaseEventLoop waits by asking it

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def nanoseconds(self) -> int:
        """The same as an integer, as `time.monotonic_ns` would say it."""
        return int(self._now * 1e9)

    def select(self, timeout: float | None) -> list[Any]:
        """Instead of waiting, be where the next timer is due."""
        self._turns += 1
        if timeout is None:
            raise Stalled(f"everything waits at {self._now:.3f} s and no timer is left")
        if self._turns > MOST_TURNS:
            raise Stalled(f"no end after {self._turns} turns, at {self._now:.3f} s")
        if timeout > 0:
            self._now = max(self._now, self._scheduled[0].when())  # type: ignore[attr-defined]
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


def run(main: Coroutine[Any, Any, None], loop: VirtualLoop) -> None:
    """Run until `main` is over, then end what it left behind."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(main)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        asyncio.set_event_loop(None)
        loop.close()
