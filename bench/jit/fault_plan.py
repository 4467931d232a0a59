"""Which rank fails how and behind how many steps: drawn from a seed, the same faults for all ways."""

from __future__ import annotations

import random
from dataclasses import dataclass

RANKS = 2
EVERY = 10
"""Steps from one periodic checkpoint to the next."""
KINDS = ("kill", "stop")
"""SIGKILL and SIGSTOP, in turns."""


@dataclass(frozen=True)
class Fault:
    """The first one happens in the first attempt of a job, the second one in the second, and so on."""

    kind: str
    rank: int
    behind: int
    """So many steps are complete; the next one has had its forward pass, and no collective yet."""

    def __str__(self) -> str:
        return f"{self.kind}:{self.rank}:{self.behind}"

    @classmethod
    def of(cls, text: str) -> Fault:
        """Of what `str` gives. Raises ValueError."""
        kind, rank, behind = text.split(":")
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is no kind of fault: use one of {', '.join(KINDS)}")
        return cls(kind, int(rank), int(behind))


def draw(seed: int, turn: int, of_each_kind: int) -> tuple[Fault, ...]:
    """The faults of one job: one in every second interval of checkpoints, anywhere in it.

    So at least one whole interval lies between the end of a recovery and the next fault.
    """
    chance = random.Random(f"{seed}/{turn}")
    return tuple(
        Fault(
            kind=KINDS[number % len(KINDS)],
            rank=chance.randrange(RANKS),
            behind=EVERY * (2 * number + 1) + chance.randrange(EVERY),
        )
        for number in range(len(KINDS) * of_each_kind)
    )


def steps(of_each_kind: int) -> int:
    """So that each fault has the step behind it: the same for all jobs, whose losses are compared."""
    return EVERY * 2 * len(KINDS) * of_each_kind + 1
