"""The relay: what a launcher watches in place of a worker, wherever that runs.

It passes on output and signals and ends as the worker did.  Below it are a pid namespace with our init
(worker_init.py) in it, and the worker, whose stdin, stdout and stderr are files.  It is never dumped itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import stat
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from understudy.recovery.migration.process import namespaces, worker_init
from understudy.recovery.migration.process.worker_init import Files
from understudy.recovery.migration.relay.forwarding import FORWARDED

IN_MODIFY = 0x2
HOLE = 0x3
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE."""
CHUNK = 1 << 20
PROGRAM = "proxyrun"
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Stream:
    """A file that the worker appends to, and where it goes."""

    file: int
    to: int
    done: int = 0
    broken: bool = False

    def pass_on(self) -> None:
        """All that there is; memory of what was passed on is given back."""
        while data := os.pread(self.file, CHUNK, self.done):
            if not self.broken:
                try:
                    _write(self.to, data)
                except OSError:  # nobody reads any more; that must not end the training
                    self.broken = True
            page = os.sysconf("SC_PAGESIZE")
            before, self.done = self.done // page * page, self.done + len(data)
            length = self.done // page * page - before
            if length > 0:
                _libc.fallocate(self.file, HOLE, ctypes.c_long(before), ctypes.c_long(length))


def _write(to: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(to, view) :]
        except BlockingIOError:
            select.select([], [to], [])


def main(command: Sequence[str]) -> NoReturn:
    """Run `command` as a worker; ends as it does."""
    try:
        directory = Path(tempfile.mkdtemp(prefix="r", dir=os.environ["UNDERSTUDY_RELAYS"]))
        streams, files = _streams(directory)
        ours, theirs = os.pipe()
        before = {number: signal.getsignal(number) for number in FORWARDED}
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        namespaces.unshare(namespaces.CLONE_NEWPID)  # of our children, not of ourselves
        child = os.fork()
        if child == 0:
            os.close(ours)
            worker_init.main(command, directory, files, theirs)
    except OSError as problem:
        _fail(f"a worker cannot be made migratable here: {problem}; see recoveryctl doctor")
    os.close(theirs)

    def forward(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in FORWARDED:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    status = _relay(streams, ours, directory)
    os.waitpid(child, 0)
    for stream in streams:
        stream.pass_on()
    _clean(directory)
    _end_as(status)


def _streams(directory: Path) -> tuple[list[Stream], Files]:
    """(what is to be passed on, what the worker is to open)."""
    streams: dict[tuple[int, int], Stream] = {}
    outputs: list[str] = []
    for number, name in ((1, "stdout"), (2, "stderr")):
        try:
            state = os.fstat(number)
        except OSError:  # closed by whoever started us
            outputs.append(os.devnull)
            continue
        key = (state.st_dev, state.st_ino)
        if key not in streams:
            path = directory / name
            path.touch(mode=0o600)
            streams[key] = Stream(os.open(path, os.O_RDWR | os.O_CLOEXEC), number)
        # What goes to the same place stays in order.
        outputs.append(str(directory / ("stdout" if streams[key].to == 1 else "stderr")))
    return list(streams.values()), Files(*_stdin(), outputs[0], outputs[1])


def _stdin() -> tuple[str, int]:
    """The file that it is and where it stands; else nothing: a pipe or a terminal cannot be moved."""
    try:
        if stat.S_ISREG(os.fstat(0).st_mode):
            return os.readlink("/proc/self/fd/0"), os.lseek(0, 0, os.SEEK_CUR)
    except OSError:
        pass
    return os.devnull, 0


def _relay(streams: list[Stream], ended: int, directory: Path) -> int:
    """Until the worker has ended; answers its wait status."""
    watch = _libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    _libc.inotify_add_watch(watch, os.fsencode(directory), IN_MODIFY)
    text = b""
    while True:
        for stream in streams:
            stream.pass_on()
        readable, _, _ = select.select([watch, ended], [], [])
        if watch in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(watch, 1 << 16)
        if ended in readable:
            data = os.read(ended, 4096)
            text += data
            if not data:
                os.close(watch)
                return _status(text)


def _status(text: bytes) -> int:
    """What our init said; it may have been killed."""
    try:
        told = json.loads(text)
        if problem := told.get("problem"):
            _say(str(problem))
        return int(told["status"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return int(signal.SIGKILL)


def _clean(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()


def _end_as(status: int) -> NoReturn:
    """With the same exit status, or by the same signal."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(OSError, ValueError):
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the core would be ours
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF if not os.WIFSIGNALED(status) else 255)


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{PROGRAM}: {sentence}\n".encode())


def _fail(sentence: str) -> NoReturn:
    _say(sentence)
    sys.exit(2)
