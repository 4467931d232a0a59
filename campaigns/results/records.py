"""What is known of a run when it is over: one JSON file of each, which reports are made from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

PARTS = (
    "compute", "snapshot", "write", "sync", "detect", "restart", "copy", "communicators", "replay", "redone",
)  # fmt: skip
"""Of the seconds of a run, in the order of a fault's course; what is left over is *unaccounted* (eq. 7)."""


RESTART = "restart"
"""The plan of a recovery that starts processes again; the proxy's are named as in its reports."""


class Record(BaseModel):
    """Of a file that anybody may have written: checked when it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Attempt(Record):
    """From one start of the ranks to their end; seconds since the run began."""

    ranks: int
    began: float
    ended: float
    status: int
    """Exit status; negative: a signal."""


class FaultSeen(Record):
    """`at`: seconds since the run began, None where it did not fire or nobody saw when."""

    kind: str
    step: int
    rank: int
    place: float
    fired: bool
    at: float | None = None


class Span(Record):
    """A part of the timeline of rank 0, or of the launcher; seconds since the run began."""

    what: str
    since: float
    until: float


class Recovery(Record):
    """One recovery by the proxy, in its report's words; or one restart. Seconds."""

    fault: str
    rank: int
    plan: str
    total: float
    parts: Mapping[str, float]
    """Of PARTS."""


class Checkpoints(Record):
    """Seconds of rank 0, summed (paper 002, Tables 1 and 5)."""

    count: int = 0
    snapshot: float = 0.0
    write: float = 0.0
    stall: float = 0.0
    enqueue: float = 0.0
    backpressure: float = 0.0
    bytes: int = 0


class Samples(Record):
    """What `understudy.data check` says of it."""

    exact: bool
    sentence: str


class Comparison(Record):
    """With the undisturbed reference of the same training and seed."""

    parameters_equal: bool
    losses_equal: bool
    loss_difference: float
    """Mean of absolute differences over the steps (eq. 8)."""
    distances: Mapping[int, float] = Field(default_factory=dict)
    """L2 distance of parameters at each checkpoint that both have, by step; the last step is the end."""


class Run(Record):
    """A run: a suite's training in a variant with a seed. Seconds."""

    suite: str
    training: str
    data: str
    model: str
    schedule: str
    variant: str
    seed: int
    disturbed: bool
    status: Literal["done", "failed", "impossible", "absent"]
    """`impossible`: such a fault cannot happen to it. `absent`: its peer is not there."""
    why: str = ""
    target: int
    steps: int = 0
    """That were completed, counted once."""
    wall: float = 0.0
    """From its start to its end."""
    starting: float = 0.0
    """Until the first step began."""
    ending: float = 0.0
    """Behind the last step's end."""
    parts: Mapping[str, float] = Field(default_factory=dict)
    """Of what lies between."""
    unaccounted: float = 0.0
    timeline: tuple[Span, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    faults: tuple[FaultSeen, ...] = ()
    recoveries: tuple[Recovery, ...] = ()
    step_seconds: float = 0.0
    """Median."""
    redone: int = 0
    """Steps that were done more than once."""
    checkpoints: Checkpoints = Checkpoints()
    samples: Samples | None = None
    """None: nobody accounts for them in a command of the user's own."""
    comparison: Comparison | None = None
    exact: bool = True
    """Whether the variant promises the bits, under these faults."""
    left_behind: tuple[str, ...] = ()
    load: float = 0.0
    """Of the machine, one minute's average, before it began."""

    @property
    def training_seconds(self) -> float:
        """From the first step's begin to the last one's end: what goodput is reckoned from."""
        return self.wall - self.starting - self.ending

    @property
    def goodput(self) -> float:
        """Steps per second (eq. 6)."""
        return self.steps / self.training_seconds if self.training_seconds > 0 else 0.0

    @property
    def restarts(self) -> int:
        """By the supervisor, or by the launcher of a variant that starts ranks again itself."""
        seen = sum(one.plan == RESTART for one in self.recoveries)
        return max(seen, len(self.attempts) - 1, 0)

    def artifacts(self) -> dict[str, Any]:
        """As JSON has it."""
        return self.model_dump(mode="json")
