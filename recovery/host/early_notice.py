"""Deaths of device servers noticed by a word in their logs, before the kernel gives their memory back.

A pidfd tells of a death once the process is unmapped, which takes longer the more memory it had.  A device
server holds a word of its log's control page as one holds a robust mutex; the kernel marks it at the
beginning of the server's end and wakes us (`replay/csrc/life/life_watch.h`).  The worker could write the mark
as well, so it only makes us look: a death is one when /proc tells of every thread of the server that it is in
its exit.  Then nothing of it can write into the log any more, and another server may.  Its memory, and that
of its device, is gone when its pidfd says so, which remains the second notice of everything.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from understudy import replay
from understudy.recovery.machine.processes import Watched

log = structlog.get_logger()


class EarlyNotice:
    """Tells `Watched` processes that they have stopped, in the event loop that made this."""

    def __init__(self) -> None:
        self._followed: dict[int, Watched] = {}
        self._watch: replay.LifeWatch | None = None
        try:
            self._watch = replay.LifeWatch()
        except replay.LogError as problem:
            log.warning(
                "deaths of device servers are noticed by pidfd alone, tens of milliseconds later",
                reason=str(problem),
            )
            return
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._watch.fileno(), self._take)

    @property
    def usable(self) -> bool:
        """Whether the kernel can do it."""
        return self._watch is not None

    def follow(self, process: Watched, directory: Path) -> int:
        """The device server of that log, from now on; a number for `leave`.  0: its pidfd has to do."""
        if self._watch is None or process.ended.is_set():
            return 0
        try:
            number = self._watch.watch(str(directory), process.pid, process.start_ticks)
        except replay.LogError as problem:
            log.warning("the death of a device server is noticed by pidfd alone", reason=str(problem))
            return 0
        self._followed[number] = process
        return number

    def leave(self, number: int) -> None:
        """Nobody waits for it any more."""
        if self._followed.pop(number, None) is not None and self._watch is not None:
            self._watch.forget(number)

    def close(self) -> None:
        """Let go of threads and descriptor."""
        if self._watch is not None:
            self._loop.remove_reader(self._watch.fileno())
            self._watch = None
            self._followed.clear()

    def _take(self) -> None:
        assert self._watch is not None
        for notice in self._watch.take():
            process = self._followed.get(notice.id)
            if process is None:
                continue
            if notice.news == replay.LifeNews.DIED:
                process.has_stopped(notice.at_ns)
            elif notice.news == replay.LifeNews.DISBELIEVED:
                log.warning(
                    "the word of a log tells of a death, and this device server runs: its pidfd will tell of "
                    "its end",
                    pid=process.pid,
                )
            else:
                log.warning("the death of a device server is noticed by pidfd alone", pid=process.pid)
