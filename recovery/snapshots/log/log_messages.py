"""What proxyd and a run's log copier say to each other: JSON lines on the copier's stdin and stdout."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from understudy import replay
from understudy.recovery.snapshots.log.stored_log import About
from understudy.recovery.snapshots.writing.request import single


@dataclass(frozen=True)
class Rank:
    """A rank and where its log lies."""

    rank: int
    directory: str
    threads: int


@dataclass(frozen=True)
class Follow:
    """Copy what these ranks commit, from now on."""

    driver: str
    ranks: tuple[Rank, ...]

    def about(self, run: Path, rank: Rank) -> About:
        """As a rank's files begin; raises OSError or LogError."""
        log = replay.Log(rank.directory)
        return About(
            run.parent.name, run.name, rank.rank, log.world, self.driver, rank.threads, log.segment_bytes,
            log.dictionary_bytes,
        )  # fmt: skip


@dataclass(frozen=True)
class Drop:
    """What lies before this offset of a rank's log is not needed any more."""

    rank: int
    offset: int


@dataclass(frozen=True)
class Copied:
    """All up to this offset of a rank's log is durable; counts are of what came since the last one."""

    rank: int
    offset: int
    step: int
    """Of the newest commit."""
    bytes: int
    gaps: int
    """How often the log was let go of before it was copied."""


@dataclass(frozen=True)
class Trouble:
    """Why nothing of a rank's log gets there, a sentence."""

    rank: int
    error: str


Message = Follow | Drop | Copied | Trouble


def encode(message: Message) -> bytes:
    """One line."""
    return json.dumps({type(message).__name__.lower(): asdict(message)}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Raises ValueError."""
    name, fields = single(line)
    try:
        if name == "follow":
            ranks = [Rank(int(r["rank"]), str(r["directory"]), int(r["threads"])) for r in fields["ranks"]]
            return Follow(str(fields["driver"]), tuple(ranks))
        if name == "drop":
            return Drop(int(fields["rank"]), int(fields["offset"]))
        if name == "copied":
            return Copied(*(int(fields[key]) for key in ("rank", "offset", "step", "bytes", "gaps")))
        if name == "trouble":
            return Trouble(int(fields["rank"]), str(fields["error"]))
    except (KeyError, TypeError) as problem:
        raise ValueError(f"{line[:200]!r} is no message") from problem
    raise ValueError(f"there is no message {name!r}")
