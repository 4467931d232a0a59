"""What is said of a run's samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from understudy.recovery.samples.run import Key

Place = tuple[int, int, int]
"""Loader, epoch, step."""


@dataclass(frozen=True)
class Offence:
    """Something that is wrong, and where it is in the run."""

    attempt: Key
    minibatch: int
    rank: int
    sentence: str
    place: Place | None = None

    def __str__(self) -> str:
        number, restart, process = self.attempt
        where = [f"attempt {number}"] if number > 1 else []
        where += [f"restart {restart}"] if restart else []
        where += [f"process {process + 1}"] if process else []
        where.append(f"rank {self.rank}")
        if self.minibatch:
            where.append(f"minibatch {self.minibatch}")
        if self.place is not None:
            loader, epoch, step = self.place
            where.append(f"loader {loader}, epoch {epoch}, step {step}")
        return f"{', '.join(where)}: {self.sentence}"


@dataclass
class Found:
    """What one look at a run has found."""

    offences: list[Offence] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    repeated: int = 0
    """Samples that came again within an epoch, where nothing says that they may."""

    def note_once(self, sentence: str) -> None:
        """For the reader; nothing is wrong."""
        if sentence not in self.notes:
            self.notes.append(sentence)


@dataclass(frozen=True)
class Verdict:
    """All of it."""

    attempts: int
    ranks: int
    batches: int
    samples: int
    minibatches: int
    payloads: int
    bytes: int
    loaders: Sequence[str]
    repeated: int
    offences: Sequence[Offence]
    notes: Sequence[str]

    @property
    def good(self) -> bool:
        return not self.offences
