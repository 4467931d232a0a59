"""The store device servers meet at; keys begin with their job.

It is written down too: servers that meet while proxyd dies go on with its successor, and notice nothing.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

log = structlog.get_logger()

LARGEST_VALUE = 16 << 20
LARGEST_STORE = 256 << 20
"""Bytes: of a value, and of all keys and values."""
LONGEST_KEY = 4096
MOST_KEYS = 65536
MOST_DONE = 4096
"""Requests whose answers are kept, in case that they come again: from who has not heard the answer ..."""
MOST_DONE_OF_WORKERS = 1 << 18
"""... and of workers, who may come back from an image of minutes ago and ask all since then again."""
SPARE_NOTES = 1 << 20
"""Bytes that notes may have beyond twice what they had when they were last written anew."""
FILE = "store"
RENDEZVOUS = "meet"
"""What stands for the generation in the key of a member that is there (proxy_server/backends.py)."""
LONGEST_NUMBER = 20


class StoreFull(ValueError):
    """No more goes into a store; its text is a sentence."""


@dataclass(frozen=True)
class Change:
    """What became of a key.  `value` None: it is not there.  `request`, `count`: as in Answered."""

    key: str
    value: bytes | None
    request: str = ""
    count: int = 0


@dataclass(frozen=True)
class Answered:
    """What was done by a request that must not be done twice."""

    key: str
    count: int


class Notes:
    """What a store holds, line by line, the last one of a key counts.

    ["key", "value in base64"], and behind them, if a request may come again, its id and what it was answered.
    With null for a value, there is none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _open(path)
        self._bytes = self._bytes_anew = 0

    @property
    def long(self) -> bool:
        """Whether most are of what is over: a counter that grows all the time has a line each time."""
        return self._bytes > 2 * self._bytes_anew + SPARE_NOTES

    def add(self, key: str, value: bytes | None, request: str = "", count: int = 0) -> None:
        """Outlives us from here on."""
        line: list[str | int | None] = [key, base64.b64encode(value).decode() if value is not None else None]
        text = json.dumps([*line, request, count] if request else line).encode() + b"\n"
        self._bytes += len(text)
        while text:
            text = text[os.write(self._file, text) :]

    @property
    def closed(self) -> bool:
        """Whether they end here."""
        return self._file < 0

    def close(self) -> None:
        """Nothing is added any more: whoever tries fails, rather than meet another file of that number."""
        os.close(self._file)
        self._file = -1

    def read(self) -> tuple[dict[str, bytes], dict[str, Answered]]:
        """All that is legible, and requests by id; the last line may have been cut by a death."""
        values: dict[str, bytes] = {}
        done: dict[str, Answered] = {}
        for line in self._path.read_bytes().splitlines():
            try:
                key, value, *request = json.loads(line)
                if value is None:
                    values.pop(str(key), None)
                else:
                    values[str(key)] = base64.b64decode(value, validate=True)
                if request:
                    done[str(request[0])] = Answered(str(key), int(request[1]))
            except (ValueError, TypeError, IndexError):
                continue
        return values, done

    def replace(self, values: dict[str, bytes], done: dict[str, Answered]) -> None:
        """Forget everything but these; raises OSError, and then all is as it was."""
        new = self._path.with_suffix(".new")
        new.unlink(missing_ok=True)
        former, self._file = self._file, _open(new)
        size, self._bytes = self._bytes, 0
        try:
            for request, one in done.items():  # in their order; what a key holds in the end comes behind
                self.add(one.key, None, request, one.count)
            for key, value in values.items():
                self.add(key, value)
            new.rename(self._path)
        except OSError:
            former, self._file, self._bytes = self._file, former, size
            new.unlink(missing_ok=True)
            raise
        finally:
            os.close(former)
        self._bytes_anew = self._bytes


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


class _Wait:
    """A reader's wait for keys; whoever puts the last one ends it."""

    def __init__(self, missing: set[str]) -> None:
        self.missing = missing
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def has(self, key: str) -> None:
        """It is there now."""
        self.missing.discard(key)
        if not self.missing and not self.over.done():
            self.over.set_result(None)


class Store:
    """Keys and values; a waiting reader is woken once, when all that it waits for is there."""

    def __init__(self, notes: Notes | None = None, most_done: int = MOST_DONE) -> None:
        """`most_done`: requests whose answers are kept, the newest."""
        self._notes = notes
        self._most_done = most_done
        self._behind = False
        """Whether notes are missing what the store holds."""
        self._values: dict[str, bytes] = {}
        self._done: dict[str, Answered] = {}
        self._bytes = 0
        if notes is not None:
            self._values, self._done = notes.read()
            notes.replace(self._values, self._done)  # nothing may be added to a line that was cut
            self._bytes = sum(_size(key, value) for key, value in self._values.items())
        self._waits: dict[str, set[_Wait]] = {}
        """Readers by the keys that they miss."""
        self._told: Callable[[Change], None] | None = None

    def tell_changes(self, told: Callable[[Change], None] | None) -> None:
        """Call `told` with every change from here on, in order; None: nobody is told any more."""
        self._told = told

    def changes(self) -> list[Change]:
        """Those that make an empty store like this one."""
        made = [Change(one.key, None, request, one.count) for request, one in self._done.items()]
        return made + [Change(key, value) for key, value in self._values.items()]

    def take(self, change: Change) -> None:
        """What another store has told; nobody waits here for keys.  Raises StoreFull."""
        if change.value is not None:
            self._put(change.key, change.value, change.request, change.count)
        else:
            self._remove(change.key, change.request, change.count)

    async def set(self, key: str, value: bytes, request: str = "") -> None:
        """Store and wake; raises StoreFull.  `request`: the id of one that must not be done twice."""
        if self.done(request) is None:
            self._put(key, value, request)

    def _put(self, key: str, value: bytes, request: str = "", count: int = 0) -> None:
        former = _size(key, self._values[key]) if key in self._values else 0
        if self._bytes + _size(key, value) - former > LARGEST_STORE:
            raise StoreFull(f"the store holds {LARGEST_STORE >> 20} MiB at most")
        self._bytes += _size(key, value) - former
        self._values[key] = value
        for wait in self._waits.pop(key, ()):
            wait.has(key)
        self._has_become(Change(key, value, request, count))

    def _remove(self, key: str, request: str = "", count: int = 0) -> None:
        if key in self._values:
            self._bytes -= _size(key, self._values.pop(key))
        elif not request:
            return
        self._has_become(Change(key, None, request, count))

    def _has_become(self, change: Change) -> None:
        if change.request:
            self._done[change.request] = Answered(change.key, change.count)
            if len(self._done) > self._most_done:
                del self._done[next(iter(self._done))]
        self._note(lambda notes: notes.add(change.key, change.value, change.request, change.count))
        if self._told is not None:
            self._told(change)

    def _note(self, change: Callable[[Notes], None]) -> None:
        """A full file system ends no job: what is not written down is missing only to a successor."""
        if self._notes is None:
            return
        try:
            if self._behind or self._notes.long:
                self._notes.replace(self._values, self._done)
            else:
                change(self._notes)
        except OSError as problem:
            if self._notes.closed:
                raise
            if not self._behind:
                log.error("the store's notes cannot be written: nobody can adopt jobs if proxyd dies",
                          problem=str(problem))  # fmt: skip
            self._behind = True
        else:
            self._behind = False

    async def get(self, key: str, timeout: float) -> bytes | None:
        """The value, waited for at most `timeout` seconds."""
        found = await self.get_all([key], timeout)
        return None if found is None else found[0]

    async def get_all(self, keys: Sequence[str], timeout: float) -> list[bytes] | None:
        """The values at a moment at which all keys were there, waited for at most `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while missing := [key for key in keys if key not in self._values]:  # some may have gone again
                    await self._has_come(missing)
        return None if missing else [self._values[key] for key in keys]

    async def _has_come(self, missing: Collection[str]) -> None:
        wait = _Wait(set(missing))
        for key in missing:
            self._waits.setdefault(key, set()).add(wait)
        try:
            await wait.over
        finally:
            for key in wait.missing:
                self._waits[key].discard(wait)
                if not self._waits[key]:
                    del self._waits[key]

    async def add(self, key: str, amount: int, request: str = "") -> int:
        """Add to a number kept as text, as c10d's stores do; a missing one counts as 0.

        A request that was done before is only answered again.  Raises ValueError, if it holds no number.
        """
        if (before := self.done(request)) is not None:
            return before
        total = int(self._values.get(key, b"0")) + amount
        self._put(key, str(total).encode(), request, total)
        return total

    def done(self, request: str) -> int | None:
        """What a request was answered; None: it has not been done."""
        known = self._done.get(request)
        return None if known is None else known.count

    def holds(self, keys: list[str]) -> bool:
        """Whether all exist."""
        return all(key in self._values for key in keys)

    def delete(self, key: str, request: str = "") -> bool:
        """Whether there was one.  `request`: as in `set`; what others have done to the key stays known."""
        if (before := self.done(request)) is not None:
            return bool(before)
        found = key in self._values
        self._remove(key, request, int(found))
        return found

    def forget(self, prefix: str) -> None:
        """Drop every key of a job, and what is known of requests for those that are gone already."""
        self._done = {request: one for request, one in self._done.items() if not one.key.startswith(prefix)}
        self._drop([key for key in self._values if key.startswith(prefix)])

    def forget_generations(self, job: str, oldest: int, ranks: Collection[int] = ()) -> None:
        """Drop what a job's servers told each other to build communicators of generations before `oldest`.

        And that members of a communicator are there whose `ranks` go back: they come to it once more, or not.
        """
        self._drop(
            [
                key for key, value in self._values.items()
                if _generation(job, key, value) < oldest or _member(job, key, value) in ranks
            ]
        )  # fmt: skip

    def _drop(self, keys: list[str]) -> None:
        if not keys:
            return
        for key in keys:
            self._bytes -= _size(key, self._values.pop(key))
        gone = set(keys)
        self._done = {request: one for request, one in self._done.items() if one.key not in gone}
        self._note(lambda notes: notes.replace(self._values, self._done))
        if self._told is not None:
            for key in keys:
                self._told(Change(key, None))

    @property
    def bytes(self) -> int:
        """How much all keys and values have."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._values)


def _generation(job: str, key: str, value: bytes) -> float:
    """The generation in a communicator's key, JOB/GENERATION/COMMUNICATOR/…; others never grow old."""
    whose, _, rest = key.partition("/")
    number, _, _ = rest.partition("/")
    found = _told(value)[0] if number == RENDEZVOUS else _number(number)
    return math.inf if whose != job or found is None else found


def _member(job: str, key: str, value: bytes) -> int | None:
    """The rank whose being there a key JOB/meet/COMMUNICATOR/MEMBER tells of."""
    return _told(value)[1] if key.startswith(f"{job}/{RENDEZVOUS}/") else None


def _told(value: bytes) -> tuple[int | None, int | None]:
    """Generation and rank in the job of a member that is there (proxy_server/backends.py)."""
    generation, _, rank = value.decode(errors="replace").partition(" ")
    return _number(generation), _number(rank)


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= LONGEST_NUMBER else None


def _size(key: str, value: bytes) -> int:
    return len(key) + len(value)
