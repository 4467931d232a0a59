"""When faults come: each kind of schedule of a campaign's file, and the faults that a seed makes of it.

Pure: the same schedule, seed and size of a run give the same faults, for all ways of running.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from understudy.campaigns.planning.faults import KINDS, Fault
from understudy.recovery.costs.models.goodput_model import BadTrace, read_trace

FIRST = 3
"""The first step that a drawn fault may strike: before it, shapes are learnt and DDP makes its buckets."""
SECONDS_PER_HOUR = 3600


class Strict(BaseModel):
    """Of a campaign's file: what is not known is refused, and nothing is changed once it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _known(kind: str) -> str:
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no fault: there are {', '.join(KINDS)}")
    return kind


Kinds = Annotated[str, Field(description="a fault")]


class Undisturbed(Strict):
    """No fault."""

    kind: Literal["none"]

    def faults(self, steps: int, ranks: int, seed: int) -> list[Fault]:
        return []


class AtSteps(Strict):
    """At fixed steps, as in the paper (§4.5), in front of the step's first call."""

    kind: Literal["steps"]
    at: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1)
    fault: Kinds = "kill"
    rank: int = Field(0, ge=0)

    _fault = field_validator("fault")(_known)

    def faults(self, steps: int, ranks: int, seed: int) -> list[Fault]:
        return [Fault(step, self.rank, self.fault) for step in self.at]


class Burst(Strict):
    """Two ranks within a second, in the same step."""

    kind: Literal["burst"]
    at: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1)

    def faults(self, steps: int, ranks: int, seed: int) -> list[Fault]:
        return [Fault(step, rank, "kill") for step in self.at for rank in range(2)]


class AtRecords(Strict):
    """So many, each at a random place of a random step: natively an instant of it, else a record."""

    kind: Literal["records"]
    count: int = Field(ge=1, le=1000)
    fault: Kinds = "kill"

    _fault = field_validator("fault")(_known)

    def faults(self, steps: int, ranks: int, seed: int) -> list[Fault]:
        chance = random.Random(f"records {seed}")
        room = range(FIRST, steps)
        chosen = sorted(chance.sample(room, min(self.count, len(room))))
        return [Fault(step, chance.randrange(ranks), self.fault, chance.random()) for step in chosen]


class Poisson(Strict):
    """A Poisson process over the steps, of `mean` faults in a run on average; at random places of them."""

    kind: Literal["poisson"]
    mean: float = Field(gt=0, le=1000)

    def faults(self, steps: int, ranks: int, seed: int) -> list[Fault]:
        chance = random.Random(f"poisson {seed}")
        at, found = float(FIRST), []
        while (at := at + chance.expovariate(self.mean / (steps - FIRST))) < steps:
            found.append(Fault(int(at), chance.randrange(ranks), "kill", at % 1))
        return _one_a_step(found)


class EachKind(Strict):
    """Faults of `recoveryctl drill --list`, one behind the other, at random records, evenly spaced."""

    kind: Literal["kinds"]
    faults_: tuple[Kinds, ...] = Field(min_length=1, alias="faults")

    @field_validator("faults_")
    @classmethod
    def _all_known(cls, kinds: tuple[str, ...]) -> tuple[str, ...]:
        for kind in kinds:
            _known(kind)
        return kinds

    def faults(self, steps: int, ranks: int, seed: int) -> list[Fault]:
        chance = random.Random(f"kinds {seed}")
        apart = (steps - FIRST) / len(self.faults_)
        return [
            Fault(FIRST + int(number * apart), chance.randrange(ranks), kind, chance.random())
            for number, kind in enumerate(self.faults_)
        ]


class Resize(Strict):
    """The last rank is lost in step `lost`, the others go on without it, and it is back from `back` on."""

    kind: Literal["resize"]
    lost: int = Field(ge=1)
    back: int = Field(ge=1)

    def faults(self, steps: int, ranks: int, seed: int) -> list[Fault]:
        return [Fault(self.lost, ranks - 1, "lose-rank"), Fault(self.back, 0, "rank-returns")]


class Trace(Strict):
    """A window of recorded preemptions (columns Time, in seconds, and GPUs), scaled to the run."""

    kind: Literal["trace"]
    file: Path
    from_hour: float = Field(0.0, ge=0)
    hours: float = Field(gt=0)

    @field_validator("file")
    @classmethod
    def _has_preemptions(cls, file: Path) -> Path:
        try:
            read_trace(file)
        except BadTrace as problem:
            raise ValueError(str(problem)) from None
        return file

    def faults(self, steps: int, ranks: int, seed: int) -> list[Fault]:
        chance = random.Random(f"trace {seed}")
        found = [
            Fault(FIRST + int(share * (steps - FIRST)), chance.randrange(ranks), "kill")
            for share in self._shares()
        ]
        return _one_a_step(found)

    def _shares(self) -> Iterable[float]:
        """Where in the window devices were taken away, 0 to 1."""
        for change in read_trace(self.file).changes:
            share = (change.at_s / SECONDS_PER_HOUR - self.from_hour) / self.hours
            if change.after < change.before and 0 <= share < 1:
                yield share


Schedule = Annotated[
    Undisturbed | AtSteps | Burst | AtRecords | Poisson | EachKind | Resize | Trace,
    Field(discriminator="kind"),
]


def _one_a_step(faults: Iterable[Fault]) -> list[Fault]:
    """The first of each step: a step that is struck twice is the schedule `burst`."""
    found: dict[int, Fault] = {}
    for fault in faults:
        found.setdefault(fault.step, fault)
    return list(found.values())
