"""Appends the logs of a job's ranks to files, commit by commit, for as long as proxyd lives.

    python -m understudy.recovery.snapshots.log.log_copier RUN --parent PID

It reads one line, a Follow, and then Drops; it answers Copied and Trouble (log_messages.py).  A process of
its own: what it reads belongs to workers, and a disk may hang.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from understudy import replay
from understudy.recovery.snapshots.log.log_messages import (
    Copied,
    Drop,
    Follow,
    Rank,
    Trouble,
    decode,
)
from understudy.recovery.snapshots.log.stored_log import (
    About,
    Chain,
    Kind,
    encode_commit,
    ends_step,
    read_frames,
)
from understudy.recovery.snapshots.stores.layout import in_use, log_path, logs_of
from understudy.recovery.snapshots.writing.described_changes import Descriptions
from understudy.recovery.snapshots.writing.writer import read_description, sync_entries

PIECE = 8 << 20
"""Bytes of a frame of records or templates."""
FULL = 16 << 20
"""Bytes after which a new file is begun, so that old ones can go; beside them the templates, which each
repeats, must not count for much:"""
TEMPLATES_SHARE = 4
BUSY_S, IDLE_S, LONGEST_PAUSE_S = 0.001, 0.002, 0.02
"""Between two looks for commits: each without any doubles the pause."""
RETRY_S = 5.0
"""After trouble with storage."""


class LogOfRank:
    """One rank's log on its way to storage.  Only one thread uses it, but for `drop`."""

    def __init__(self, run: Path, about: About, directory: Path) -> None:
        """Raises OSError or LogError."""
        self._run, self._about, self._directory = run, about, directory
        self._log = replay.Log(str(directory))
        self._file = -1
        self._chain = Chain()
        self._descriptions = Descriptions()
        self._written = self._templates = self._repeated = 0
        """Bytes of the file; id up to which it holds templates; bytes that it began with."""
        self.position = self._at = self._durable_end()
        """Log offsets up to which all is durable, and up to which it was written."""
        self.step = self._gaps = self._bytes = 0
        self._commit = 0
        """The newest that was looked at."""

    def told(self) -> Copied:
        """How far it has come."""
        told = Copied(self._about.rank, self.position, self.step, self._bytes, self._gaps)
        self._bytes = self._gaps = 0
        return told

    def copy(self) -> bool:
        """What has been committed since the last time; whether there was any.  Raises OSError."""
        log = self._log
        count = log.commit_count
        if count == self._commit:
            return False
        try:
            return self._copy(count)
        except replay.LogError:  # the log has gone on without us
            freed = log.freed_segments * log.segment_bytes
            if freed > self.position:
                self._begin_behind(freed)
            return False

    def close(self) -> None:
        """Nothing more comes into the present file."""
        if self._file >= 0:
            descriptor, self._file = self._file, -1
            os.close(descriptor)

    def drop(self, offset: int) -> None:
        """Records before that are of no use any more.  Raises OSError."""
        files = [file for file in logs_of(self._run) if file.rank == self._about.rank]
        for older, newer in itertools.pairwise(files):
            if newer.begin <= offset:
                older.path.unlink(missing_ok=True)

    def _durable_end(self) -> int:
        """Behind the last commit in files of a copier that ended before us."""
        files = [file for file in logs_of(self._run) if file.rank == self._about.rank]
        end = 0
        for one in files[-1:]:
            with open(one.path, "rb") as file:
                frames = read_frames(file, os.fstat(file.fileno()).st_size)
                commits = [frame.number for frame in frames if frame.kind is Kind.COMMIT]
            end = max([one.begin, *commits])
        return end

    def _copy(self, count: int) -> bool:
        log = self._log
        freed = log.freed_segments * log.segment_bytes
        if freed > self.position:
            self._begin_behind(freed)
        if count < self._commit:
            self._commit = 0  # a recovery went back
        new = [c for c in log.commits() if c.number > self._commit and c.log_offset >= self._at]
        for commit in new:
            self._append(commit)
            self._commit = commit.number
        self._commit = count
        if not new:
            return False
        os.fdatasync(self._file)
        self.position, self.step = self._at, new[-1].step
        if self._written > max(FULL, TEMPLATES_SHARE * self._repeated):
            self.close()
        return True

    def _append(self, commit: replay.Commit) -> None:
        log = self._log
        copied = replay.copy_commit(log, commit.number)
        offset = copied.commit.log_offset
        if self._file < 0:
            self._begin(self._at)
        templates = log.dictionary_tail
        for begin in range(max(self._templates, log.dictionary_begin), templates, PIECE):
            end = min(begin + PIECE, templates)
            self._put(Kind.TEMPLATES, begin, replay.copy_templates(log, begin, end))
        self._templates = templates
        while self._at < offset:
            end = min(self._at + PIECE, offset)
            self._put(Kind.RECORDS, self._at, replay.copy_records(log, self._at, end))
            self._at = end
        if ends_step(copied.commit):
            self._put_description(copied.commit.step)
        self._put(Kind.COMMIT, offset, encode_commit(copied))

    def _put_description(self, step: int) -> None:
        path = self._directory / f"step-{step}"
        described = read_description(path)
        if not described:
            return
        with contextlib.suppress(ValueError, RecursionError):  # no JSON: as good as none
            self._put(Kind.DESCRIPTION, step, self._descriptions.encode(described))
        path.unlink(missing_ok=True)

    def _begin(self, offset: int) -> None:
        """A new file; raises OSError."""
        path = log_path(self._run, self._about.rank, offset)
        self._file = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        self._chain, self._descriptions = Chain(), Descriptions()
        self._written = 0
        sync_entries(path)
        self._put(Kind.ABOUT, offset, self._about.encode())
        self._templates = self._log.dictionary_begin
        self._repeated = self._log.dictionary_tail - self._templates

    def _begin_behind(self, offset: int) -> None:
        """Storage, or we, were too slow: what lies before is gone, and a new file begins there."""
        self._gaps += 1
        if self._file >= 0:
            with contextlib.suppress(OSError):
                self._put(Kind.END, offset, b"storage was slower than the training")
        self.close()
        self.position = self._at = offset

    def _put(self, kind: Kind, number: int, content: bytes) -> None:
        frame = memoryview(self._chain.encode(kind, number, content))
        self._written += len(frame)
        self._bytes += len(frame)
        while frame:
            frame = frame[os.write(self._file, frame) :]


class Copier:
    """Copies the logs of one run of a job."""

    def __init__(self, run: Path, answer: Callable[[Copied | Trouble], None]) -> None:
        self._run, self._answer = run, answer
        self._ranks: dict[int, LogOfRank] = {}

    def follow(self, follow: Follow) -> None:
        """Each rank in a thread of its own, from here on."""
        for rank in follow.ranks:
            threading.Thread(target=self._follow, args=(follow, rank), daemon=True).start()

    def drop(self, drop: Drop) -> None:
        """Files of a rank that are not needed any more."""
        known = self._ranks.get(drop.rank)
        if known is not None:
            with contextlib.suppress(OSError):  # they are only in the way, and the next drop names them again
                known.drop(drop.offset)

    def _follow(self, follow: Follow, rank: Rank) -> None:
        while True:
            try:
                self._copy(follow, rank)
            except (OSError, replay.LogError) as problem:
                self._answer(Trouble(rank.rank, str(problem) or repr(problem)))
                time.sleep(RETRY_S)

    def _copy(self, follow: Follow, rank: Rank) -> None:
        self._run.mkdir(mode=0o700, parents=True, exist_ok=True)
        with in_use(self._run):
            about = follow.about(self._run, rank)
            log = self._ranks[rank.rank] = LogOfRank(self._run, about, Path(rank.directory))
            pause = IDLE_S
            try:
                while True:
                    if log.copy():
                        self._answer(log.told())
                        pause = BUSY_S
                    else:
                        pause = min(2 * pause, LONGEST_PAUSE_S)
                    time.sleep(pause)
            finally:
                log.close()


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="understudy-log-copier")
    parser.add_argument("run", type=Path)
    parser.add_argument("--parent", type=int, required=True)
    given = parser.parse_args()
    replay.die_with_parent(given.parent)
    answering = threading.Lock()

    def answer(message: Copied | Trouble) -> None:
        with answering:
            sys.stdout.buffer.write(message.encode())
            sys.stdout.buffer.flush()

    copier = Copier(given.run, answer)
    for line in sys.stdin.buffer:
        message = decode(line)
        if isinstance(message, Follow):
            copier.follow(message)
        elif isinstance(message, Drop):
            copier.drop(message)
    os._exit(0)  # what is under way is cut short, which readers know


if __name__ == "__main__":
    raise SystemExit(main())
