"""One training of `hints_cost`: attempts that a supervisor kills, until one of them comes to its end.

Attempts are forks of the supervisor, which has imported PyTorch and read the images: what a start of Python
takes is the same for all ways, and left out. They say what they do through a pipe, as it happens, so what one
has said before it was killed is known.
"""

from __future__ import annotations

import hashlib
import os
import random
import selectors
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from training_run import RunFailed

from understudy.hints import checkpoints, running

HINT, SAVED, ENDED = b"h", b"s", b"e"
_RECORD = struct.Struct("<cd8s")
"""What, when (seconds of the monotonic clock), and for the end the digest of the result."""
_PATIENCE_S = 300.0

Train = Callable[[], Any]


@dataclass(frozen=True)
class Way:
    """How checkpoints are placed: by hints within `overhead`, at each `every`-th hint, or none."""

    name: str
    overhead: float | None = None
    every: int | None = None


@dataclass(frozen=True)
class Said:
    """By an attempt: what, and when."""

    what: bytes
    at: float
    digest: bytes = b""


@dataclass(frozen=True)
class Attempt:
    """From `begun` until `over`, seconds of the monotonic clock."""

    begun: float
    over: float
    said: tuple[Said, ...]

    @property
    def killed(self) -> bool:
        return not self.said or self.said[-1].what != ENDED

    @property
    def lost(self) -> float:
        """Seconds that are to be done again: since the last durable checkpoint, if it was killed."""
        saved = [each.at for each in self.said if each.what == SAVED]
        return self.over - max(saved, default=self.begun) if self.killed else 0.0

    @property
    def checkpoints(self) -> int:
        return sum(each.what == SAVED for each in self.said)

    @property
    def saving(self) -> float:
        """Seconds from each hint to the checkpoint that was taken there."""
        pairs = zip(self.said, self.said[1:], strict=False)
        return sum(now.at - before.at for before, now in pairs if now.what == SAVED)


@dataclass(frozen=True)
class Outcome:
    """Of a whole training; times in seconds."""

    way: str
    overhead: float | None
    failing: bool
    seconds: float
    checkpoints: int
    saving: float
    kills: int
    lost: float
    digest: str

    @classmethod
    def of(cls, way: Way, failing: bool, attempts: Sequence[Attempt]) -> Outcome:
        return cls(
            way=way.name,
            overhead=way.overhead,
            failing=failing,
            seconds=attempts[-1].over - attempts[0].begun,
            checkpoints=sum(each.checkpoints for each in attempts),
            saving=sum(each.saving for each in attempts),
            kills=sum(each.killed for each in attempts),
            lost=sum(each.lost for each in attempts),
            digest=attempts[-1].said[-1].digest.hex(),
        )


def failures(rate: float, seed: int) -> Iterator[float]:
    """Seconds from the beginning of each attempt to the failure in it: memoryless, `rate` a second."""
    draws = random.Random(seed)
    while True:
        yield draws.expovariate(rate)


def run(
    way: Way, function: Any, arguments: tuple[Any, ...], rate: float, kills: Iterable[float], folder: Path
) -> list[Attempt]:
    """The training, each attempt killed after so many seconds, until there are no more or one has come to its
    end.

    `rate`: of failures per second, as the function is told. Raises RunFailed.
    """
    train, instants = _train(way, function, arguments, rate, folder), iter(kills)
    attempts: list[Attempt] = []
    while not attempts or attempts[-1].killed:
        attempts.append(_attempted(train, next(instants, None)))
    return attempts


def _train(way: Way, function: Any, arguments: tuple[Any, ...], rate: float, folder: Path) -> Train:
    if way.overhead is None and way.every is None:
        return lambda: function(*arguments)
    decorate = checkpoints(directory=folder, overhead=way.overhead or 1.0, failure_rate=rate, every=way.every)
    decorated: Any = decorate(function)
    return lambda: decorated(*arguments)


def _attempted(train: Train, within: float | None) -> Attempt:
    """One attempt, killed after so many seconds. Raises RunFailed where it ends otherwise."""
    reader, writer = os.pipe()
    begun = time.monotonic()
    child = os.fork()
    if not child:
        os.close(reader)
        _attempt(train, writer)
    os.close(writer)
    limit = begun + (_PATIENCE_S if within is None else min(within, _PATIENCE_S))
    with os.fdopen(reader, "rb", buffering=0) as file:
        data = _read_until(file, limit)
        if not data.ended:
            os.kill(child, signal.SIGKILL)
            data.rest(file)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    over = time.monotonic()
    whole = len(data.bytes) // _RECORD.size * _RECORD.size
    said = tuple(Said(*each) for each in _RECORD.iter_unpack(bytes(data.bytes[:whole])))
    attempt = Attempt(begun, over, said)
    expected = (
        [-signal.SIGKILL] if attempt.killed else [0, -signal.SIGKILL]
    )  # it may have said that it was at its end
    if status not in expected or (attempt.killed and within is None):
        raise RunFailed(f"an attempt ended with status {status}, after {over - begun:.1f} s")
    return attempt


class _Data:
    def __init__(self) -> None:
        self.bytes, self.ended = bytearray(), False

    def take(self, file: Any) -> None:
        piece = file.read(1 << 16)
        self.bytes += piece
        self.ended = not piece

    def rest(self, file: Any) -> None:
        while not self.ended:
            self.take(file)


def _read_until(file: Any, limit: float) -> _Data:
    data = _Data()
    with selectors.DefaultSelector() as selector:
        selector.register(file, selectors.EVENT_READ)
        while not data.ended and (left := limit - time.monotonic()) > 0:
            if selector.select(left):
                data.take(file)
    return data


def _attempt(train: Train, writer: int) -> None:
    """In the fork; does not return."""
    status = 1
    try:

        def say(what: bytes, digest: bytes = b"") -> None:
            os.write(writer, _RECORD.pack(what, time.monotonic(), digest))

        running.observer = lambda what, _: say(SAVED if what == "saved" else HINT)
        say(ENDED, _digest(train()))
        status = 0
    except BaseException:  # noqa: BLE001 - the supervisor says that it failed, this says why
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        os._exit(status)


def _digest(result: Any) -> bytes:
    """Of all bits of what the training returned."""
    found = hashlib.blake2b(digest_size=8)
    waiting = [result]
    while waiting:
        each = waiting.pop()
        if isinstance(each, torch.Tensor):
            found.update(each.contiguous().numpy().tobytes())
        elif isinstance(each, list | tuple):
            waiting += each
        else:
            found.update(repr(each).encode())
    return found.digest()
