"""What proxyd and a run's log copier say to each other: JSON lines on the copier's stdin and stdout."""

from __future__ import annotations

from pathlib import Path

import msgspec

from understudy import replay
from understudy.recovery.base.hostile_json import Line, read
from understudy.recovery.snapshots.log.stored_log import About


class Rank(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank and where its log lies."""

    rank: int
    directory: str
    threads: int


class Follow(Line, frozen=True):
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


class Drop(Line, frozen=True):
    """What lies before this offset of a rank's log is not needed any more."""

    rank: int
    offset: int


class Copied(Line, frozen=True):
    """All up to this offset of a rank's log is durable; counts are of what came since the last one."""

    rank: int
    offset: int
    step: int
    """Of the newest commit."""
    bytes: int
    gaps: int
    """How often the log was let go of before it was copied."""


class Trouble(Line, frozen=True):
    """Why nothing of a rank's log gets there, a sentence."""

    rank: int
    error: str


Message = Follow | Drop | Copied | Trouble
_MESSAGE = msgspec.json.Decoder[Message](Message)


def decode(line: bytes) -> Message:
    """Raises ValueError."""
    return read(line, _MESSAGE)
