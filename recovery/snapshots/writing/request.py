"""What proxyd and a job's writer say to each other: JSON lines on the writer's stdin and stdout."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from understudy.recovery.base.hostile_json import Line, read


class Persist(Line, frozen=True):
    """Write snapshot `serial` of the ranks of this host; they lie in logs at `directories`, by rank."""

    serial: int
    run: str
    world: int
    directories: Mapping[int, str]
    known: tuple[int, ...] | None = None
    """Serials that are complete or under way: what else is older will never be.  None: nobody can tell."""


class Release(Line, frozen=True):
    """Snapshot `serial` is durable on all ranks: older ones may go, but for `held` (0: none)."""

    serial: int
    run: str
    held: int = 0


class Discard(Line, frozen=True):
    """Snapshot `serial` will not be complete: the parts of it may go."""

    serial: int
    run: str


class Written(Line, frozen=True):
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
_REQUEST = msgspec.json.Decoder[Request](Request)
_ANSWER = msgspec.json.Decoder(Written)


def decode_request(line: bytes) -> Request:
    """Raises ValueError."""
    return read(line, _REQUEST)


def decode_answer(line: bytes) -> Written:
    """Raises ValueError."""
    return read(line, _ANSWER)
