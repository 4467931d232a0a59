"""What proxyd and a job's uploader say to each other: JSON lines on the uploader's stdin and stdout."""

from __future__ import annotations

import msgspec

from understudy.recovery.base.hostile_json import Line, read


class Target(Line, frozen=True):
    """The first line: where to copy to, and what to keep there."""

    url: str
    keep_last: int
    keep_every: int


class Copy(Line, frozen=True):
    """Copy a set that is complete in the local stores, and will be until an answer comes."""

    serial: int
    run: str


class Ready(Line, frozen=True):
    """It has nothing to do."""


class Moved(Line, frozen=True):
    """So many bytes more of the set under way have been handed over."""

    bytes: int


class Copied(Line, frozen=True):
    """The set is complete there."""

    serial: int
    step: int
    bytes: int
    seconds: float


class Failed(Line, frozen=True):
    """Something was not done (`error`, a sentence); it will be ready again after a while."""

    error: str


Answer = Ready | Moved | Copied | Failed
_TARGET = msgspec.json.Decoder(Target)
_COPY = msgspec.json.Decoder(Copy)
_ANSWER = msgspec.json.Decoder[Answer](Answer)


def decode_target(line: bytes) -> Target:
    """Raises ValueError."""
    return read(line, _TARGET)


def decode_copy(line: bytes) -> Copy:
    """Raises ValueError."""
    return read(line, _COPY)


def decode_answer(line: bytes) -> Answer:
    """Raises ValueError."""
    return read(line, _ANSWER)
