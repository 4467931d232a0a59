"""A terminal as a person has it: one bash, jobs in the background, `kill %1`, `$?`."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

LOOK_S = 0.05
END_S = 30.0
NOTICE = re.compile(r"^bash: line \d+: +\d+ \w.*\n", re.MULTILINE)
"""Of bash, that a job has died."""


class TooLong(RuntimeError):
    """A command did not end in time; the message has what it had said."""


@dataclass(frozen=True)
class Ran:
    """What a command ended with, and what it wrote to either stream."""

    status: int
    output: str


@dataclass
class Background:
    """A command that was put into the background, and what it writes."""

    line: str
    file: Path
    taken: int = field(default=0)
    """Characters that somebody has been shown."""

    def new_output(self) -> str:
        """What it has written since it was last taken."""
        return self.file.read_text(errors="replace")[self.taken :]

    def take(self) -> str:
        """That; it is old from now on."""
        new = self.new_output()
        self.taken += len(new)
        return new

    def take_lines(self, count: int) -> None:
        """So many lines of it are old from now on."""
        self.taken += sum(len(line) for line in self.new_output().splitlines(keepends=True)[:count])


class Terminal:
    """Commands typed one after the other; what runs in the background ends with it.

    What a background job writes does not get between the output of others: `background` has it.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str] = os.environ) -> None:
        self.background: list[Background] = []
        self._outputs = tempfile.TemporaryDirectory(prefix="understudy-terminal-")
        self._typed = 0
        self._status = 0
        ours, theirs = os.pipe()
        self._answers = ours
        self._bash = subprocess.Popen(
            ["bash", "--norc", "-c", f"exec 9>&{theirs} {theirs}>&-; exec bash --norc --noprofile -s"],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            cwd=folder, env=dict(environment), pass_fds=[theirs], text=True,
        )  # fmt: skip
        os.close(theirs)
        self._type("set -m")  # jobs have numbers, and process groups that Ctrl-C and `kill %1` reach whole

    def run(self, line: str, within_s: float = 120, meanwhile: Callable[[], object] = lambda: None) -> Ran:
        """Type a line, and wait for its end; one that ends in `&` goes into the background at once.

        Raises TooLong.
        """
        self._typed += 1
        file = Path(self._outputs.name) / str(self._typed)
        file.touch()
        if (command := line.rstrip()).endswith("&"):
            self.background.append(Background(line, file))
            self._type(f"{command[:-1]} </dev/null >{file} 2>&1 9>&- &")
            return Ran(0, "")
        # A comment may end the line; `$?` is that of the command before.
        self._type(f"(exit {self._status})\n{{ {line}\n}} </dev/null >{file} 2>&1\necho $? >&9")
        deadline = time.monotonic() + within_s
        while not select.select([self._answers], [], [], LOOK_S)[0]:
            meanwhile()
            if time.monotonic() > deadline:
                raise TooLong(f"{line}: no end within {within_s:.0f} s; it said: {file.read_text()}")
        self._status = int(os.read(self._answers, 100) or b"-1")
        return Ran(self._status, NOTICE.sub("", file.read_text(errors="replace")))

    def close(self) -> None:
        """End all that runs in it: first as a person would, after half a minute by force."""
        jobs = self._jobs()
        below = [one for job in jobs for one in _below(job)]
        for job in jobs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGTERM)
        _, left = psutil.wait_procs(jobs, END_S)
        for one in [*left, *below] if left else []:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        assert self._bash.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._bash.stdin.close()
        self._bash.kill()
        self._bash.wait()
        os.close(self._answers)
        self._outputs.cleanup()

    def _jobs(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self._bash.pid).children()
        except psutil.NoSuchProcess:
            return []

    def _type(self, line: str) -> None:
        assert self._bash.stdin is not None
        self._bash.stdin.write(line + "\n")
        self._bash.stdin.flush()


def _below(job: psutil.Process) -> Iterable[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return job.children(recursive=True)
    return []


def block_below(page: str, heading: str) -> list[str]:
    """The commands of the first indented block below a heading of a page."""
    found: list[str] = []
    for line in page.partition(f"\n{heading}\n")[2].splitlines():
        if line.startswith("    "):
            found.append(line[4:])
        elif found and line:
            break
    return found
