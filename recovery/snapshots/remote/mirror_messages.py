"""What proxyd and a job's uploader say to each other: JSON lines on the uploader's stdin and stdout."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from understudy.recovery.snapshots.writing.request import single


@dataclass(frozen=True)
class Target:
    """The first line: where to copy to, and what to keep there."""

    url: str
    keep_last: int
    keep_every: int


@dataclass(frozen=True)
class Copy:
    """Copy a set that is complete in the local stores, and will be until an answer comes."""

    serial: int
    run: str


@dataclass(frozen=True)
class Ready:
    """It has nothing to do."""


@dataclass(frozen=True)
class Moved:
    """So many bytes more of the set under way have been handed over."""

    bytes: int


@dataclass(frozen=True)
class Copied:
    """The set is complete there."""

    serial: int
    step: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Failed:
    """Something was not done (`error`, a sentence); it will be ready again after a while."""

    error: str


Answer = Ready | Moved | Copied | Failed


def encode(message: Target | Copy | Answer) -> bytes:
    """One line."""
    return json.dumps({type(message).__name__.lower(): asdict(message)}).encode() + b"\n"


def decode_target(line: bytes) -> Target:
    """Raises ValueError."""
    name, fields = single(line)
    if name != "target":
        raise ValueError(f"{name!r} is no target")
    return Target(str(fields["url"]), int(fields["keep_last"]), int(fields["keep_every"]))


def decode_copy(line: bytes) -> Copy:
    """Raises ValueError."""
    name, fields = single(line)
    if name != "copy":
        raise ValueError(f"there is no request {name!r}")
    return Copy(int(fields["serial"]), str(fields["run"]))


def decode_answer(line: bytes) -> Answer:
    """Raises ValueError."""
    name, fields = single(line)
    if name == "ready":
        return Ready()
    if name == "moved":
        return Moved(int(fields["bytes"]))
    if name == "copied":
        return Copied(
            int(fields["serial"]), int(fields["step"]), int(fields["bytes"]), float(fields["seconds"])
        )
    if name == "failed":
        return Failed(str(fields["error"]))
    raise ValueError(f"there is no answer {name!r}")
