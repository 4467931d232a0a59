"""Signals that a launcher sends to a worker, wherever that is: each arrives, and once."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass, field

FORWARDED = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
    signal.SIGALRM,
)  # fmt: skip
"""What a launcher may send, and the worker gets."""


@dataclass
class Signals:
    """Those that the worker has not got yet, numbered from 1 on."""

    last: int = 0
    waiting: list[tuple[int, int]] = field(default_factory=list)
    told: int = 0
    """Number of the last that was told to another host."""

    def note(self, kind: int) -> None:
        """One came."""
        self.last += 1
        self.waiting.append((self.last, kind))

    def deliver(self, worker: int) -> None:
        """The worker is here and runs."""
        waiting, self.waiting = self.waiting, []
        for _, kind in waiting:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, kind)

    def untold(self) -> list[tuple[int, int]]:
        """And now they are told."""
        found = [one for one in self.waiting if one[0] > self.told]
        self.told = max(self.told, *(number for number, _ in found)) if found else self.told
        return found

    def tell_again(self) -> None:
        """To another listener."""
        self.told = 0

    def forget(self, number: int) -> None:
        """All up to this one have arrived."""
        self.waiting = [one for one in self.waiting if one[0] > number]
