"""Scripts under `understudy.jit` in child processes, for tests of what saves and how they end."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from forks import fork
from jit_training import Training

from understudy import jit
from understudy.jit import watchdog


def wait_for_signal() -> None:
    """Until one ends the process."""
    while True:
        time.sleep(60)


class Job(Training):
    """A script under `jit` in a child process: it saves its step, its parameters and its schedule."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        with contextlib.suppress(UserWarning):
            jit.init(settings.pop("save", self.save), directory, job="test", **settings)

    def save(self, path: Path) -> None:
        state = {
            "step": jit.completed_steps(),
            "model": self.model.state_dict(),
            "scheduled": self.scheduler.last_epoch,
            "torch": torch.get_rng_state(),
            "python": random.getstate()[1][:3],
        }
        torch.save(state, path)

    def run(self, count: int, boundary: bool = True) -> None:
        for _ in range(count):
            self.step()
            self.scheduler.step()
            if boundary:
                jit.boundary()


def pretend_a_collective(completed: int) -> None:
    """One that neither ends nor moves, behind so many. What PyTorch has recorded of this process, or of the
    one that it was forked from, says nothing of it."""
    watchdog.counts = lambda: (("0", completed + 1, completed),)  # type: ignore[assignment]
    watchdog.outstanding = lambda: None  # type: ignore[assignment]


@dataclass(frozen=True)
class Ended:
    """A child process behind its end."""

    status: int
    said: str
    directory: Path

    def saved(self) -> Any:
        """What was saved, or None."""
        found = list(self.directory.glob("step-*/payload"))
        assert len(found) <= 1
        return torch.load(found[0], weights_only=False) if found else None


class Child:
    """Forked from this process, which has everything imported; it ends as a script would."""

    def __init__(self, script: Callable[[Path], None], directory: Path) -> None:
        self.directory = directory
        self.errors, errors = os.pipe()
        self.process = fork()
        with contextlib.suppress(OSError):  # by both, so that it is done for whoever is first
            os.setpgid(self.process, 0)
        if self.process == 0:
            os.dup2(errors, 2)
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            sys.excepthook = sys.__excepthook__
            try:
                script(directory)
            except BaseException as error:  # noqa: BLE001
                sys.excepthook(type(error), error, error.__traceback__)
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        os.close(errors)

    def end(self, seconds: float = 20.0) -> Ended:
        guard = threading.Timer(seconds, os.killpg, (self.process, signal.SIGKILL))
        guard.start()
        with open(self.errors, "rb") as file:
            said = file.read().decode()
        _, status = os.waitpid(self.process, 0)
        guard.cancel()
        guard.join()
        print(said)
        return Ended(os.waitstatus_to_exitcode(status), said, self.directory)


@contextmanager
def children(directory: Path) -> Iterator[Start]:
    """Starts scripts; none of them is there behind it."""
    made: list[Child] = []

    def start(script: Callable[[Path], None]) -> Child:
        made.append(Child(script, directory))
        return made[-1]

    yield start
    for one in made:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.process, signal.SIGKILL)  # with what it has forked
        with contextlib.suppress(ChildProcessError):
            os.waitpid(one.process, 0)


Start = Callable[[Callable[[Path], None]], Child]
"""Of a script, which is given the directory of its checkpoints."""


def expected(count: int) -> Any:
    """The state behind so many steps of a job that nobody disturbed."""
    torch.manual_seed(1)
    training = Training()
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 1)
    for _ in range(count):
        training.step()
        scheduler.step()
    return training.model.state_dict(), scheduler.last_epoch, torch.get_rng_state()


def assert_is_step(saved: Any, count: int) -> None:
    model, scheduled, generator = expected(count)
    assert saved["step"] == count and saved["scheduled"] == scheduled
    assert torch.equal(saved["torch"], generator)
    assert all(torch.equal(saved["model"][name], value) for name, value in model.items())
