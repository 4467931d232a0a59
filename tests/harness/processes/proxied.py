"""Running commands under proxyrun in tests, and what must be left behind by them: nothing."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from places import TESTS
from training_run import check_gpus, driver, installed

from understudy.recovery.machine.gpus import gpus_of_machine
from understudy.recovery.machine.runtime_directory import SHARED_MEMORY
from understudy.recovery.run.launch import ranks_wanted

WORKLOADS = TESTS / "workloads"


def until(holds: Callable[[], Any], what: str, within_s: float = 60, pause_s: float = 0.01) -> Any:
    """What other processes do has no event here: look until it is so.  `pause_s`: between two looks."""
    deadline = time.monotonic() + within_s
    while not (answer := holds()):
        assert time.monotonic() < deadline, f"in {within_s} s not: {what}"
        time.sleep(pause_s)
    return answer


@dataclass(frozen=True)
class Ended:
    status: int
    output: str
    report: dict[str, Any]

    def result(self) -> Any:
        """Of a script that ended well."""
        assert self.status == 0, self.output[-5000:]
        return result_in(self.output)


def result_in(output: str) -> Any:
    """What a workload says as JSON behind RESULT; others may go on writing to the same line."""
    _, found, said = output.partition("RESULT ")
    assert found, output[-5000:]
    return json.JSONDecoder().raw_decode(said)[0]


def run(command: list[str], *, folder: Path, options: tuple[str, ...] = (), timeout_s: float = 240) -> Ended:
    """`proxyrun OPTIONS COMMAND` with one thread per process."""
    chosen = "--devices" in options or "--socket" in options
    if not chosen and (
        driver() != "cpu" or gpus_of_machine()
    ):  # where there are GPUs proxyrun wants to be told
        options = ("--devices", f"{driver()}:{ranks_wanted(command)}", *options)
    report = folder / f"report-{random.randrange(10**9)}.json"
    done = subprocess.run(
        [*installed("proxyrun"), "--report", str(report), *options, *command],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Ended(done.returncode, done.stdout, json.loads(report.read_text()) if report.exists() else {})


def python(script: Path | str, *arguments: str) -> list[str]:
    return [sys.executable, str(script), *arguments]


def ranks(count: int, script: Path | str, *arguments: str) -> list[str]:
    """As torchrun starts them, in less time; where nothing depends on torchrun itself."""
    launcher = [sys.executable, str(Path(__file__).parent / "start_ranks.py")]
    return [*launcher, "--nproc-per-node", str(count), str(script), *arguments]


def torchrun(ranks: int, script: Path | str, *arguments: str) -> list[str]:
    check_gpus(ranks)
    return [*installed("torchrun"), "--standalone", "--nproc-per-node", str(ranks), str(script), *arguments]


def processes() -> list[psutil.Process]:
    """All but those that test processes beside this one (pytest -n) have started."""
    return [process for process in psutil.process_iter() if not _is_of_others(process)]


def _is_of_others(process: psutil.Process) -> bool:
    if (mine := os.environ.get("PYTEST_XDIST_WORKER")) is None:
        return False
    try:  # what pytest starts has the name in its environment only since then
        return process.ppid() == os.getppid() or process.environ().get("PYTEST_XDIST_WORKER") != mine
    except psutil.Error:
        return False


def command_of(process: psutil.Process) -> list[str]:
    """Empty if it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def our_processes() -> list[str]:
    """Processes of this installation, but for this test run itself and what started it."""
    mine = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
    found = []
    for process in processes():
        line = " ".join(command_of(process))
        if process.pid not in mine and sys.prefix in line and "pytest" not in line:
            found.append(f"{process.pid}: {line}")
    return found


def left_behind(patience_s: float = 10) -> list[str]:
    """What is still there once `patience_s` have passed; processes that end by themselves get that long."""
    deadline = time.monotonic() + patience_s
    while True:
        found = our_processes() + [str(p) for p in SHARED_MEMORY.glob("understudy-*") if "test" not in p.name]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)  # polling other processes' ends: there is nothing to wait on
