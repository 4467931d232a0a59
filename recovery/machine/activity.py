"""What a process does, as the kernel tells: stopped, running, or asleep and for how long."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

STOPPED = frozenset("Tt")
"""States of a process that a signal or a debugger has stopped."""
AT_WORK = frozenset("RD")
"""States of a thread that runs, waits for a processor, or for the kernel."""

ASK_NS = 100_000_000
"""Between two questions to the kernel about one process."""
BUSY_TICKS = 2
"""Clock ticks (10 ms each) between two questions that count as work."""


@dataclass(frozen=True)
class ProcessState:
    """One answer: the state of the process, its threads at work, and the clock ticks that all have used."""

    state: str
    at_work: frozenset[str]
    ticks: int

    @property
    def stopped(self) -> bool:
        """Whether it cannot run until somebody lets it."""
        return self.state in STOPPED


def process_state(pid: int) -> ProcessState | None:
    """What a process does; None if there is none."""
    root = Path("/proc") / str(pid)
    try:
        fields = _fields(root / "stat")
        at_work = frozenset(
            thread
            for thread in os.listdir(root / "task")
            if _fields(root / "task" / thread / "stat")[0] in AT_WORK
        )
    except (OSError, IndexError):
        return None
    return ProcessState(fields[0], at_work, int(fields[11]) + int(fields[12]))


def _fields(path: Path) -> list[str]:
    """From field 3 (the state) on: the second one may hold spaces."""
    return path.read_text().rpartition(")")[2].split()


class Activity:
    """Follows one process: since when it is stopped, and since when it has done nothing worth mentioning."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._asked_ns = 0
        self._ticks = -1
        self._at_work: frozenset[str] = frozenset()
        self.stopped_since_ns = 0
        """0 while it is not stopped."""
        self.quiet_since_ns = 0
        self.watched_since_ns = 0
        """Since when somebody has looked all the time."""

    def look(self, now_ns: int) -> None:
        """Ask the kernel, if the last answer is old."""
        if now_ns - self._asked_ns < ASK_NS:
            return
        if now_ns - self._asked_ns > 3 * ASK_NS:
            self.quiet_since_ns = self.watched_since_ns = now_ns  # nobody has looked for a while
            self.stopped_since_ns = 0
        self._asked_ns = now_ns
        state = process_state(self._pid)
        if state is None:
            return
        if not state.stopped:
            self.stopped_since_ns = 0
        elif not self.stopped_since_ns:
            self.stopped_since_ns = now_ns
        # On a busy machine a thread that only looks at its clock waits for a processor too, but not twice.
        if state.ticks - self._ticks >= BUSY_TICKS or self._at_work & state.at_work:
            self.quiet_since_ns = now_ns
        self._ticks, self._at_work = state.ticks, state.at_work
