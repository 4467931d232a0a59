"""Starts a training under torchrun and writes down what torchrun says, and when.

torchrun waits 30 s for a process that SIGTERM does not end, and takes no option for that where it restarts a
job (`--shutdown-timeout` is for its own end). A stopped process is such a one: it is killed here after
`patience` seconds, unless that is as long as torchrun waits.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fault_plan import RANKS, Fault
from training_run import ROOT, execute, installed

from understudy.campaigns.results.stamps import Stamp, of_ranks
from understudy.campaigns.running.launcher_lines import stamp_of

LAUNCHERS_PATIENCE_S = 30.0
SCRIPT = ROOT / "bench" / "jit" / "failing_training.py"
MOST_S = 120.0
"""For a job; and so much more for each fault."""
MORE_S = 60.0


@dataclass(frozen=True)
class Setting:
    """What all jobs have; times in seconds. `timeout`: of collectives."""

    timeout: float
    minimum_stall: float
    patience: float
    tiny: bool = False


STOPS = re.compile(r"fault: process (\d+) stops")
SIGNALLED = re.compile(r"Sending process (\d+) closing signal")


class Onlooker:
    """Reads the launcher's lines as they come, and kills those that stopped, when the launcher waits."""

    def __init__(self, patience: float) -> None:
        self.stamps: list[Stamp] = []
        self._patience = patience
        self._stopped: set[int] = set()
        self._timers: list[threading.Timer] = []

    def on_line(self, line: str) -> None:
        if (stamp := stamp_of(line, time.monotonic())) is not None:
            self.stamps.append(stamp)
        if found := STOPS.search(line):
            self._stopped.add(int(found[1]))
        if (found := SIGNALLED.search(line)) and int(found[1]) in self._stopped:
            self._stopped.remove(int(found[1]))
            self._kill_later(int(found[1]))

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()

    def _kill_later(self, process: int) -> None:
        if self._patience < LAUNCHERS_PATIENCE_S:
            timer = threading.Timer(self._patience, _kill, (process,))
            timer.start()
            self._timers.append(timer)


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def run(way: str, faults: Sequence[Fault], steps: int, setting: Setting, folder: Path) -> list[Stamp]:
    """One job; all that was stamped, in no order. `folder` must be new. Raises RunFailed."""
    folder.mkdir()
    command = [
        "env", "LOGLEVEL=INFO", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", f"TMPDIR={folder}",
        *installed("torchrun"), "--standalone", "--nproc-per-node", str(RANKS),
        "--max-restarts", str(len(faults)),
        str(SCRIPT), way, str(folder), "--steps", str(steps), "--timeout", str(setting.timeout),
        "--minimum-stall", str(setting.minimum_stall), "--faults", ",".join(map(str, faults)),
        *(["--tiny"] if setting.tiny else []),
    ]  # fmt: skip
    onlooker = Onlooker(setting.patience)
    try:
        output = execute(command, MOST_S + MORE_S * len(faults), onlooker.on_line)
    finally:
        onlooker.close()
    (folder / "output").write_text(output)
    return [*onlooker.stamps, *of_ranks(folder)]
