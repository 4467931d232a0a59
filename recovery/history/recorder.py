"""What proxyd did and noticed, of running jobs and of ended ones: JSON lines in a file that outlives it.

Every line is one write at the end of the file, under a lock: several proxyds of a user, on several hosts
where the home directory is shared, have one file.  A full one is renamed, so that there are two at most.
Nobody depends on it: whatever fails here is one warning in the log.  Whoever reads it takes no line for
granted.  What happens is made into lines by events.py.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import queue
import re
import secrets
import socket
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import structlog

from understudy.recovery.base.job_names import TAIL
from understudy.recovery.machine.socket_path import default_socket

log = structlog.get_logger()

VARIABLE = "UNDERSTUDY_HISTORY"
FILE = "history.jsonl"
LARGEST = 4 << 20
"""Bytes of the file; then it is renamed, and a new one begins."""
LONGEST_LINE = 16 << 10
LONGEST_TEXT = 1000
"""Characters of one text in a line."""
LAST_MS = 32_503_680_000_000
"""The year 3000."""
LOCK_S, LOOK_S = 5.0, 0.01
"""How long whoever has the lock may keep it, and the pause between two looks."""
MOST_WAITING = 1000
"""Lines that are yet to be written."""
ROTATIONS = 100
"""By others, while one line is being written."""
_KIND = re.compile(r"[a-z][a-z-]{0,31}")


class Kind(StrEnum):
    """What a line tells of.  A reader may meet others: of a newer version."""

    START = "start"
    END = "end"
    RECOVERY = "recovery"
    MOVE = "move"
    DRILL = "drill"
    ADOPTION = "adoption"
    VALIDATION = "validation"


def new_id() -> str:
    """A recovery's id, as r-7f3a9c: people say it, and hardly any two of one history have the same."""
    return f"r-{''.join(secrets.choice(TAIL) for _ in range(6))}"


def now_ms() -> int:
    """Milliseconds since 1970."""
    return int(time.time() * 1000)


@dataclass(frozen=True)
class Event:
    """One line.  `seconds`: how long it took; `more`: whatever else is known, as JSON has it."""

    kind: str
    job: str
    what: str = ""
    outcome: str = ""
    id: str = ""
    rank: int | None = None
    step: int | None = None
    seconds: float | None = None
    at_ms: int = field(default_factory=now_ms)
    more: Mapping[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """Without its end; raises ValueError if it is too long, though texts were cut."""
        own = {name: getattr(self, name) for name in _FIELDS}
        told = {name: _short(value) for name, value in own.items() if value not in (None, "")}
        more = {name: _short(value) for name, value in self.more.items() if name not in _FIELDS}
        for whole in (told | more, told):
            if len(made := json.dumps(whole, default=str)) < LONGEST_LINE:
                return made
        raise ValueError(f"a line of {len(made)} bytes")


_FIELDS = {
    "at_ms": int, "kind": str, "job": str, "id": str, "what": str, "rank": int, "step": int,
    "seconds": (int, float), "outcome": str,
}  # fmt: skip
"""Of an Event, in the order in which a line has them -> what each must be."""


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    return value[:LONGEST_TEXT] if isinstance(value, str) else value


def parse(line: bytes) -> Event | None:
    """None: it makes no sense."""
    if len(line) > LONGEST_LINE:
        return None
    try:
        found = json.loads(line.decode(), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not {"at_ms", "kind"} <= found.keys():
        return None
    told = {name: found.pop(name) for name in _FIELDS if name in found}
    for name, value in told.items():
        if isinstance(value, bool) or not isinstance(value, _FIELDS[name]):  # type: ignore[arg-type]
            return None
    numbers = [told[name] for name in ("rank", "step", "seconds") if name in told]
    if not 0 <= told["at_ms"] <= LAST_MS or not all(0 <= number < 1 << 63 for number in numbers):
        return None
    return Event(**({"job": ""} | told), more=found) if _KIND.fullmatch(told["kind"]) else None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no number")


# ------------------------------------------------------------------ where
def history_file() -> Path:
    """Where it is, whether or not there is one."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    of_service = os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
    if os.path.isabs(of_service):
        return Path(of_service) / FILE
    state = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(state):
        return Path(state) / "understudy" / FILE
    home = os.environ.get("HOME", "")
    below = Path(home) / ".local/state/understudy"
    if os.path.isabs(home) and os.path.isdir(home) and _can_be_made(below):
        return below / FILE
    return default_socket().absolute().parent / FILE


def _can_be_made(directory: Path) -> bool:
    there = next(one for one in (directory, *directory.parents) if os.path.exists(one))
    return os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)


def older(path: Path) -> Path:
    """The file that was full."""
    return path.with_name(f"{path.name}.1")


# ------------------------------------------------------------------ reading
@dataclass(frozen=True)
class History:
    """Events, the oldest first, and how many lines made no sense."""

    events: tuple[Event, ...] = ()
    nonsense: int = 0


def read(path: Path) -> History:
    """Reads a file that others may be writing to and renaming; raises OSError if it cannot be read."""
    events: list[Event] = []
    nonsense = 0
    for line in _lines(path):
        if (event := parse(line)) is not None:
            events.append(event)
        elif line:
            nonsense += 1
    return History(tuple(events), nonsense)


def _lines(path: Path) -> Iterator[bytes]:
    """The current file is opened first: if it is renamed meanwhile, it is found twice, and not missed."""
    with contextlib.ExitStack() as opened:
        handles: dict[tuple[int, int], int] = {}
        for one in (path, older(path)):
            with contextlib.suppress(FileNotFoundError):
                handle = os.open(one, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                opened.callback(os.close, handle)
                state = os.fstat(handle)
                if not stat.S_ISREG(state.st_mode):
                    raise OSError(errno.EINVAL, "it is no regular file")
                handles.setdefault((state.st_dev, state.st_ino), handle)
        for handle in reversed(handles.values()):
            *whole, last = _end_of(handle).split(b"\n")
            yield from whole
            if parse(last) is not None:  # else it is being written, or whoever wrote it has died of it
                yield last


def _end_of(handle: int) -> bytes:
    """What came last, if a file is longer than any of ours."""
    start = max(0, os.fstat(handle).st_size - 2 * LARGEST)
    with open(handle, "rb", closefd=False) as file:
        file.seek(start)
        content = file.read(2 * LARGEST)
    return content.partition(b"\n")[2] if start else content


# ------------------------------------------------------------------ writing
def append(path: Path, line: str, lock_s: float = LOCK_S) -> None:
    """All of it or nothing, whoever else appends meanwhile, for `lock_s` at most; raises OSError."""
    _make_directory(path.parent)
    content = line.encode() + b"\n"
    for _ in range(ROTATIONS):
        handle = os.open(
            path,
            os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
            0o600,
        )
        try:
            if _append(handle, path, content, lock_s):
                return
        finally:
            os.close(handle)  # and with it goes the lock
    raise OSError(errno.EBUSY, "it is renamed again and again")


def _append(handle: int, path: Path, content: bytes, lock_s: float) -> bool:
    """False: it is another file that is to be written to."""
    state = os.fstat(handle)
    if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
        raise OSError(errno.EPERM, "it is no regular file of ours")
    if stat.S_IMODE(state.st_mode) != 0o600:
        os.fchmod(handle, 0o600)
    _lock(handle, lock_s)
    size = os.fstat(handle).st_size
    if not _is_at(path, handle):
        return False
    if size and size + len(content) >= LARGEST:
        os.replace(path, older(path))
        return False
    if size and os.pread(handle, 1, size - 1) != b"\n":  # whoever wrote it has died of it
        content = b"\n" + content
    if os.write(handle, content) < len(content):
        os.ftruncate(handle, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return True


def _make_directory(directory: Path) -> None:
    missing = [one for one in (directory, *directory.parents) if not os.path.exists(one)]
    for one in reversed(missing):
        one.mkdir(mode=0o700, exist_ok=True)


def _lock(handle: int, within_s: float) -> None:
    """Not for ever: whoever has it may be stopped, or on a host that is gone."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise OSError(errno.EBUSY, f"somebody has kept it locked for {within_s:.0f} s") from None
            time.sleep(LOOK_S)


def _is_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


class Recorder:
    """Where no history is kept."""

    def add(self, event: Event) -> None:
        """Returns at once, whatever becomes of it."""

    def settle(self, within_s: float) -> None:
        """Until what was added is written, or has failed to be."""


class FileRecorder(Recorder):
    """Writes in a thread of its own: nobody waits for a home directory whose server does not answer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._origin = {"host": socket.gethostname(), "proxyd": os.getpid()}
        self._waiting: queue.Queue[Event | threading.Event] = queue.Queue(MOST_WAITING)
        self._warned = False
        self._thread: threading.Thread | None = None

    def add(self, event: Event) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="history", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            self._warn(f"{MOST_WAITING} lines wait to be written")

    def settle(self, within_s: float) -> None:
        written = threading.Event()
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._waiting.put(written, timeout=within_s)
                written.wait(within_s)

    def _write(self) -> None:
        while True:
            item = self._waiting.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                append(self._path, replace(item, more={**item.more, **self._origin}).line())
                self._warned = False
            except (OSError, ValueError) as problem:
                self._warn(getattr(problem, "strerror", None) or str(problem))

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("what happens does not get into the history", file=str(self._path), problem=problem)


def recorder() -> Recorder:
    """Who writes the history of this process; none where the file is /dev/null."""
    path = history_file()
    return Recorder() if path == Path(os.devnull) else FileRecorder(path)
