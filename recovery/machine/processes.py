"""Watching and ending processes by pidfd: never the wrong process.

A pidfd tells of an end when the kernel has given back the process's memory, files and devices.  That a device
server dies may be known before (`early_notice.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import time
from pathlib import Path

from understudy import replay
from understudy.protos import control_pb2 as pb


class Watched:
    """A process that is not our child, followed until it ends."""

    def __init__(self, pid: int, started: int = 0) -> None:
        """Raises ProcessLookupError if there is no such process; `started`: the start ticks it must have."""
        self.pid = pid
        self.ended = asyncio.Event()
        """It does nothing any more; what it had may still be on its way back."""
        self.ended_ns = 0
        """CLOCK_MONOTONIC of the notice."""
        self.memory_gone = asyncio.Event()
        """Nothing is left of it: memory, that of devices, files."""
        self._fd = os.pidfd_open(pid)
        self.start_ticks = start_ticks(pid)
        """With the pid it names this very process."""
        if started and self.start_ticks != started:  # asked when the pidfd held whatever has the pid now
            os.close(self._fd)
            raise ProcessLookupError(f"process {pid} has ended, and its pid was given to another one")
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._on_end)

    @classmethod
    def of(cls, pid: int, started: int) -> Watched:
        """A process that may have ended already, or never was."""
        if pid <= 0:
            return cls.gone(pid, started)
        try:
            return cls(pid, started)
        except ProcessLookupError:
            return cls.gone(pid, started)

    @classmethod
    def gone(cls, pid: int, started: int) -> Watched:
        """A process that has ended, noticed now."""
        gone = cls.__new__(cls)
        gone.pid, gone.start_ticks, gone._fd = pid, started, -1
        gone.ended, gone.memory_gone = asyncio.Event(), asyncio.Event()
        gone.ended_ns = 0
        gone.has_stopped(time.monotonic_ns())
        gone.memory_gone.set()
        return gone

    def _on_end(self) -> None:
        self._loop.remove_reader(self._fd)
        self.has_stopped(time.monotonic_ns())
        self.memory_gone.set()

    def has_stopped(self, at_ns: int) -> None:
        """No thread of it runs its program any more; `at_ns`: CLOCK_MONOTONIC of the notice."""
        if not self.ended.is_set():
            self.ended_ns = at_ns
            self.ended.set()

    def hear_of_end(self, at_ns: int = 0) -> None:
        """Somebody else says that it has ended.  Of a process of this host the kernel tells us itself."""

    def maps(self, directory: Path) -> bool:
        """Whether a file of that directory is mapped there, as far as can be told.

        By their inodes, as a container may have another name for it.  A program that replaced itself (exec)
        has none of them.
        """
        try:
            files = {str(entry.inode()) for entry in os.scandir(directory)}
            lines = Path(f"/proc/{self.pid}/maps").read_text(errors="surrogateescape").splitlines()
        except OSError:
            return True
        return any(len(words) > 4 and words[4] in files for words in map(str.split, lines))

    def has_become_another(self) -> None:
        """The program that was followed is no more, though its process is."""
        self._on_end()

    @property
    def running(self) -> bool:
        """Whether it still runs, asked of the kernel and not of the event loop."""
        if self._fd < 0 or self.ended.is_set():
            return False
        return not select.select([self._fd], [], [], 0)[0]

    def message(self) -> pb.Process:
        """As it travels."""
        return pb.Process(pid=self.pid, start_ticks=self.start_ticks)

    def send(self, number: signal.Signals) -> None:
        """Signal it, if it still runs."""
        if self._fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, number)

    def close(self) -> None:
        """Stop watching."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    async def end(self, grace: float) -> None:
        """Ask it to stop, insist after `grace` seconds; nothing is left of it when this returns."""
        self.send(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.memory_gone.wait(), grace)
        except TimeoutError:
            self.send(signal.SIGKILL)
            await self.memory_gone.wait()


def start_ticks(pid: int) -> int:
    """When a process started (field 22 of /proc/PID/stat): tells a reused pid apart.  0 if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def is_same_process(pid: int, started: int) -> bool:
    """Whether the process that had this pid and these start ticks still runs."""
    return replay.process_is_alive(pid, started)
