"""What happened when, as the ranks of a training and the one who looks at its launcher write it down.

Each rank appends JSON lines to a file of its own. All times are seconds of CLOCK_MONOTONIC, which is one
clock for all processes of a machine.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

LAUNCHER = -1
"""Stands for a rank in what is read off the launcher's own lines."""


@dataclass(frozen=True)
class Stamp:
    """Something that lasted from `since` to `at`; both are the same for a moment."""

    what: str
    since: float
    at: float
    rank: int = LAUNCHER
    attempt: int = -1
    """How often the launcher had restarted the job; -1 where the launcher does not say."""
    step: int = -1
    """Steps that are complete with this one; for a fault, those that were complete before it."""
    note: str = ""
    """The bits of a step's loss, the reason of a save, the process of a fault."""


class Recorder:
    """One rank's file. What is written is the kernel's at once, and stays when the rank is killed."""

    def __init__(self, folder: Path, rank: int, attempt: int) -> None:
        self._rank, self._attempt = rank, attempt
        self._file = os.open(folder / f"rank-{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, what: str, since: float, at: float, step: int = -1, note: str = "") -> None:
        line = json.dumps(asdict(Stamp(what, since, at, self._rank, self._attempt, step, note)))
        os.write(self._file, f"{line}\n".encode())

    def moment(self, what: str, step: int = -1, note: str = "") -> None:
        """It happens now."""
        now = time.monotonic()
        self.write(what, now, now, step, note)

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        """What happens inside the context."""
        since = time.monotonic()
        yield
        self.write(what, since, time.monotonic())


def of_ranks(folder: Path) -> list[Stamp]:
    """All that the ranks of a training have written."""
    return [stamp for path in sorted(folder.glob("rank-*.jsonl")) for stamp in of_lines(path.open())]


def of_lines(lines: Iterable[str]) -> list[Stamp]:
    """Raises ValueError and TypeError for what no `Recorder` has written."""
    return [Stamp(**json.loads(line)) for line in lines]
