"""The process that writes parts of a job's snapshots on this host, whenever there is something to write."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from understudy.recovery.base.own_modules import module_command
from understudy.recovery.snapshots.settings import PersistenceSettings
from understudy.recovery.snapshots.writing.request import (
    Discard,
    Persist,
    Release,
    Request,
    Written,
    decode_answer,
)
from understudy.recovery.state.jobs import Session

KILLED_S = 2.0
"""How long to wait for a writer's end: while its disk hangs, not even SIGKILL ends it."""

Known = Collection[int] | None
"""Serials of a run that are complete or under way: what else is older will never be.  None: not known."""


class Parts(Protocol):
    """Who writes the parts of sets: here, or on the hosts where their ranks run."""

    def persist(self, serial: int, run: str, sessions: Sequence[Session], known: Known) -> None:
        """Each of these ranks answers once."""

    def tell(self, request: Release | Discard, step: int = 0) -> None:
        """What has become of a set.  `step`: of one that is complete."""

    def dismiss(self) -> None:
        """There was trouble: begin anew with the next set."""

    def break_off(self) -> None:
        """Forget what is under way."""


class PartWriter:
    """Writes the parts of one job."""

    def __init__(self, job: str, settings: PersistenceSettings, take: Callable[[Written], None]) -> None:
        """`take` is called with every answer."""
        self._job, self._settings, self._take = job, settings, take
        self._pipe: asyncio.StreamWriter | None = None
        """To the process, while there is one."""
        self._process: asyncio.subprocess.Process | None = None
        self._unsent: list[Request] = []
        self._awaited: dict[tuple[str, int], set[int]] = defaultdict(set)
        """Ranks whose answers the present process owes, by run and serial."""
        self._dismissed = False
        self._wanted = asyncio.Event()

    def persist(self, serial: int, run: str, sessions: Sequence[Session], known: Known) -> None:
        """Orders the parts of these ranks, which all run here."""
        for former in [key for key in self._awaited if key[0] != run]:
            del self._awaited[former]  # its workers have left: nobody waits for it
        self._end_if_dismissed()
        directories = {session.rank: str(session.directory) for session in sessions}
        counts = tuple(sorted(known)) if known is not None else None
        self._send(Persist(serial, run, sessions[0].world, directories, counts))

    def tell(self, request: Release | Discard, step: int = 0) -> None:
        """What has become of a set."""
        self._send(request)

    def dismiss(self) -> None:
        """End a process that had trouble, as soon as it has nothing to do; the next set starts another.

        While it holds files of a disk that failed, that can neither be unmounted nor come back to life.
        """
        self._dismissed = self._pipe is not None

    def break_off(self) -> None:
        """End the process, which stores survive, without waiting."""
        self._unsent = [request for request in self._unsent if not isinstance(request, Persist)]
        self._awaited.clear()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def run(self) -> None:
        """The process, whenever there is something to write; until cancelled."""
        while True:
            await self._wanted.wait()
            requests = self._hand_over()
            try:
                ended = f"its writer ended: {await self._follow(requests)}"
            except (OSError, ValueError) as problem:
                ended = f"its writer ended: {problem}"
            lost, self._dismissed = dict(self._awaited), False
            self._awaited.clear()
            for (run, serial), ranks in sorted(lost.items()):
                for rank in sorted(ranks):
                    self._take(Written(serial, run, rank, error=ended))

    def heard(self, written: Written) -> None:
        """An answer has been taken."""
        ranks = self._awaited.get((written.run, written.serial), set())
        ranks.discard(written.rank)
        if not ranks:
            self._awaited.pop((written.run, written.serial), None)
        self._end_if_dismissed()

    def _end_if_dismissed(self) -> None:
        if self._dismissed and self._pipe is not None and not self._awaited:
            self._pipe.close()
            self._pipe = None

    async def _follow(self, requests: Sequence[Request]) -> str:
        """From its start, with these requests, to its end; how it ended."""
        settings, writing = self._settings, self._settings.writing
        process = await asyncio.create_subprocess_exec(
            *module_command("recovery.snapshots.writing.writer"), str(settings.directory),
            "--job", self._job, "--slots", str(settings.all_slots), "--threads", str(writing.threads),
            "--chunk", str(writing.chunk_bytes), "--pool", str(writing.pool_bytes),
            "--keep-runs", str(settings.keep_runs), "--parent", str(os.getpid()),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is proxyd's to handle
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        try:
            self._pipe, self._process = process.stdin, process
            for request in (*requests, *self._hand_over()):
                self._pipe.write(request.encode())
            while line := await process.stdout.readline():
                written = decode_answer(line)
                self._take(written)
                self.heard(written)
            return f"status {await process.wait()}"
        finally:  # what is under way is cut short, which stores survive
            self._pipe = self._process = None
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), KILLED_S)

    def _hand_over(self) -> list[Request]:
        """What a process is about to be told."""
        requests, self._unsent = self._unsent, []
        self._wanted.clear()
        for request in requests:
            self._await(request)
        return requests

    def _await(self, request: Request) -> None:
        if isinstance(request, Persist):
            self._awaited[request.run, request.serial] |= request.directories.keys()

    def _send(self, request: Request) -> None:
        if self._pipe is not None and not (self._dismissed and isinstance(request, Persist)):
            self._await(request)
            self._pipe.write(request.encode())
        else:
            self._unsent.append(request)
            self._wanted.set()


PartsWith = Callable[[PartWriter, Callable[[Written], None]], Parts]
"""This host's writer, and what takes its answers -> who writes the parts of sets."""


def here_alone(writer: PartWriter, take: Callable[[Written], None]) -> Parts:
    """Who writes the parts of a job that has all its ranks on this host."""
    return writer
