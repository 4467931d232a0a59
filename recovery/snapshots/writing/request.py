"""What proxyd and a job's writer say to each other: JSON lines on the writer's stdin and stdout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Persist:
    """Write snapshot `serial` of the ranks of this host; they lie in logs at `directories`, by rank."""

    serial: int
    run: str
    world: int
    directories: Mapping[int, str]
    known: tuple[int, ...] | None = None
    """Serials that are complete or under way: what else is older will never be.  None: nobody can tell."""


@dataclass(frozen=True)
class Release:
    """Snapshot `serial` is durable on all ranks: older ones may go, but for `held` (0: none)."""

    serial: int
    run: str
    held: int = 0


@dataclass(frozen=True)
class Discard:
    """Snapshot `serial` will not be complete: the parts of it may go."""

    serial: int
    run: str


@dataclass(frozen=True)
class Written:
    """A rank's part is durable, or (`error`, a sentence) it is not."""

    serial: int
    run: str
    rank: int
    step: int = 0
    bytes: int = 0
    """Of payload."""
    seconds: float = 0.0
    error: str = ""
    gone: bool = False
    """Host memory did not hold it any more, which says nothing against the storage."""


Request = Persist | Release | Discard


def encode(message: Request | Written) -> bytes:
    """One line."""
    return json.dumps({type(message).__name__.lower(): asdict(message)}).encode() + b"\n"


def decode_request(line: bytes) -> Request:
    """Raises ValueError."""
    name, fields = single(line)
    if name == "persist":
        return Persist(
            int(fields["serial"]), str(fields["run"]), int(fields["world"]),
            {int(rank): str(path) for rank, path in dict(fields["directories"]).items()},
            None if fields["known"] is None else tuple(map(int, fields["known"])),
        )  # fmt: skip
    if name == "release":
        return Release(int(fields["serial"]), str(fields["run"]), int(fields["held"]))
    if name == "discard":
        return Discard(int(fields["serial"]), str(fields["run"]))
    raise ValueError(f"there is no request {name!r}")


def decode_answer(line: bytes) -> Written:
    """Raises ValueError."""
    name, fields = single(line)
    if name != "written":
        raise ValueError(f"there is no answer {name!r}")
    return Written(
        int(fields["serial"]), str(fields["run"]), int(fields["rank"]), int(fields["step"]),
        int(fields["bytes"]), float(fields["seconds"]), str(fields["error"]),
        bool(fields["gone"]),
    )  # fmt: skip


def single(line: bytes) -> tuple[str, Mapping[str, Any]]:
    """Name and fields of a message; raises ValueError."""
    try:
        ((name, fields),) = json.loads(line).items()
        return str(name), dict(fields)
    except (AttributeError, TypeError, ValueError) as problem:
        raise ValueError(f"{line[:200]!r} is no message") from problem
