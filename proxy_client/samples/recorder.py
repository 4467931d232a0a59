"""Writes a rank's file: one for each rank, a line for each batch and each minibatch, appended.

A process is taken for a rank once it uses the device.  What it was handed before that (the first batch, as a
rule) waits; a process that never does so, such as a worker of a DataLoader, writes nothing.  No trouble here
may disturb the training: one that cannot write says so once, and the record ends there.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from understudy.proxy_client.samples import lines

DIRECTORY = "UNDERSTUDY_SAMPLES"
ATTEMPT = "UNDERSTUDY_SAMPLES_ATTEMPT"
MOST_WAITING = 4096
"""Lines of a process that has not used the device yet; with more, it does something else with its data."""

Line = Callable[[int], str]
"""Made once its number is known."""


class Recorder:
    """Of this process.  Any thread."""

    def __init__(self, directory: str, attempt: int) -> None:
        self._directory, self._attempt = Path(directory), attempt
        self._lock = threading.Lock()
        self._waiting: list[Line] = []
        self._left_out = 0
        self._rank: int | None = None
        self._file = -1
        self._next = 0
        self._broken = False
        self._told: set[str] = set()

    def begin(self, rank: int, world: int) -> None:
        """It is this rank, as its session opens."""
        with self._lock:
            if self._rank is not None or self._broken:
                return
            self._rank = rank
            restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
            count = int(restart) if restart.isascii() and restart.isdigit() and len(restart) < 9 else 0
            self._try(self._open)
            self._write(lambda _: lines.beginning(self._attempt, count, rank, world, self._left_out))
            for line in self._waiting:
                self._write(line)
            self._waiting = []

    def note(self, line: Line) -> None:
        """One line more."""
        with self._lock:
            if self._rank is not None:
                self._write(line)
            elif not self._broken:
                self._wait(line)

    def tell_once(self, sentence: str) -> None:
        """To the user, by the first rank alone: others would say the same."""
        if sentence not in self._told:
            self._told.add(sentence)
            if (os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0") == "0":
                sys.stderr.write(f"understudy: --samples: {sentence}\n")

    def stop(self, why: str) -> None:
        """Say it, and write nothing more."""
        with self._lock:
            self._stop(why)

    def after_fork(self) -> None:
        """In the child: what its parent was handed is none of its own."""
        self._lock = threading.Lock()
        self._waiting, self._left_out = [], 0
        if self._rank is not None:  # the device is its parent's, and so is the file
            self._rank, self._file, self._broken = None, -1, True

    def _wait(self, line: Line) -> None:
        if not self._left_out or getattr(line, "introduces", False):
            self._waiting.append(line)
        else:
            self._left_out += 1
        if len(self._waiting) > MOST_WAITING:  # later lines name the loaders, so these stay
            kept = [line for line in self._waiting if getattr(line, "introduces", False)]
            self._left_out += len(self._waiting) - len(kept)
            self._waiting = kept
            self._broken = len(kept) > MOST_WAITING // 2

    def _open(self) -> None:
        path = self._directory / f"samples-rank{self._rank:05d}.jsonl"
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(path, flags, 0o600)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":  # torn as the run before was killed
            os.write(self._file, b"\n")

    def _write(self, line: Line) -> None:
        if self._broken:
            return
        number, self._next = self._next, self._next + 1
        self._try(lambda: self._append(line(number).encode() + b"\n"))

    def _append(self, data: bytes) -> None:
        while data:  # a write may be cut short by a full disk, whose error the next one raises
            data = data[os.write(self._file, data) :]

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as problem:
            self._stop(f"the samples of rank {self._rank} are not recorded any more: {problem}")

    def _stop(self, why: str) -> None:
        if not self._broken:
            self._broken = True
            self._waiting = []
            sys.stderr.write(f"understudy: --samples: {why}\n")


def asked_for(environment: Mapping[str, str]) -> Recorder | None:
    """None: nobody has asked for samples."""
    directory, attempt = environment.get(DIRECTORY, ""), environment.get(ATTEMPT, "")
    return Recorder(directory, int(attempt)) if directory and attempt.isdigit() else None
