"""Starts the ranks of a run, and starts them again until the target is reached (paper 002 §4.7).

Launch, monitor, recover, terminate; the same for all variants, whoever starts ranks again inside of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from understudy.campaigns.programs.training import ATTEMPT
from understudy.campaigns.results.records import Attempt
from understudy.campaigns.results.stamps import Stamp
from understudy.campaigns.running.launcher_lines import stamp_of
from understudy.campaigns.running.manifest import write_json
from understudy.campaigns.running.own_processes import MARK, described, kill_all, left_after

OUTPUT = "output"
SUPERVISOR = "supervisor.json"


class End(Enum):
    """How a run ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    """As often as it may be started again."""
    OVERDUE = "overdue"


@dataclass(frozen=True)
class Order:
    """What to start. `command(attempt)`: of that attempt, and how many ranks it has. Times in seconds."""

    command: Callable[[int], tuple[Sequence[str], int]]
    folder: Path
    mark: str
    environment: Mapping[str, str]
    restarts: int
    limit: float
    settled: float = 10.0
    """For its processes to end behind it; what is there after that was left behind."""


@dataclass
class Ended:
    """Moments of CLOCK_MONOTONIC."""

    began: float
    end: End = End.FAILED
    ended: float = 0.0
    attempts: list[Attempt] = field(default_factory=list)
    said: list[Stamp] = field(default_factory=list)
    """What launchers have printed, and when."""
    left_behind: list[str] = field(default_factory=list)


def supervise(order: Order) -> Ended:
    """Until the command ends well, or may not be started again, or the time is over; leaves no process."""
    found = Ended(time.monotonic())
    deadline = found.began + order.limit
    try:
        for attempt in range(order.restarts + 1):
            words, ranks = order.command(attempt)
            began = time.monotonic()
            status, reader = _once(words, order, attempt, deadline, found.said)
            now = time.monotonic()
            found.attempts.append(
                Attempt(ranks=ranks, began=began - found.began, ended=now - found.began, status=status)
            )
            found.ended = now
            if status == 0:
                found.left_behind = [described(one) for one in left_after(order.mark, order.settled)]
            kill_all(order.mark)  # a stopped rank outlives its launcher, and whoever is left has the pipe
            reader.join()
            if status == 0 or now >= deadline:
                found.end = End.COMPLETED if status == 0 else End.OVERDUE
                break
    finally:
        kill_all(order.mark)
    write_json(
        order.folder / SUPERVISOR,
        {
            "attempts": [one.model_dump() for one in found.attempts],
            "restarts": len(found.attempts) - 1,
            "end": found.end.value,
            "left_behind": found.left_behind,
        },
    )
    return found


def _once(
    words: Sequence[str], order: Order, attempt: int, deadline: float, said: list[Stamp]
) -> tuple[int, threading.Thread]:
    """Its status, and who still reads what it prints."""
    environment = os.environ | order.environment | {MARK: order.mark, ATTEMPT: str(attempt)}
    process = subprocess.Popen(
        words,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    reader = threading.Thread(target=_read, args=(process, order.folder / OUTPUT, said))
    reader.start()
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        expired = process.poll() is None
        if expired:  # a shell whose child is killed first may still end well
            kill_all(order.mark)
            process.wait()
    return -signal.SIGKILL if expired else process.returncode, reader


def _read(process: subprocess.Popen[str], path: Path, said: list[Stamp]) -> None:
    assert process.stdout is not None
    with path.open("a") as output:
        for line in process.stdout:
            output.write(line)
            if (stamp := stamp_of(line, time.monotonic())) is not None:
                said.append(stamp)
