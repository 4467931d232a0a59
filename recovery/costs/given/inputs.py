"""What a bill is made of: a job, its failures, what each way of recovering costs.  In seconds, mostly.

Nothing has a default that counts: what a file leaves out is left out of the bill, and told.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from understudy.recovery.costs.models.layout import Layout
from understudy.recovery.costs.models.rungs import Failure, Kept
from understudy.recovery.planning.planner import PlanName

SECONDS_PER_DAY = 86_400.0
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
"""Of useful time: 0.001 for 0.1 %."""
Count = Annotated[int, Field(ge=1, le=10_000_000)]

RUNGS = (
    PlanName.REWIND_IN_PLACE,
    PlanName.RESTART_COPY_REPLAY,
    PlanName.STASH_RESTART_RESTORE,
    PlanName.RESTORE_SNAPSHOT_REPLAY,
    PlanName.RESTORE_STORED_REPLAY,
)
"""What `ours.recovery_s` may name.  A roll-forward is a restart, too, inside an optimizer step."""


class Law(Enum):
    """How the times between a GPU's failures are distributed, with mean 1 / f."""

    EXPONENTIAL = "exponential"
    """What the formulas assume."""
    WEIBULL = "weibull"
    """Of a shape below 1, a GPU that has failed is likely to fail again; fleets begin in equilibrium."""


class Section(BaseModel):
    """A part of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


class Job(Section):
    """`gpus` is N; `replicas`: data-parallel copies of the state."""

    gpus: Count
    replicas: Count
    gpus_per_host: Count
    hosts_per_rack: Count
    minibatch_s: Positive

    @model_validator(mode="after")
    def _of_equal_size(self) -> Self:
        if self.gpus % self.replicas:
            raise ValueError(f"{self.gpus} GPUs are not {self.replicas} replicas of equal size")
        return self

    @property
    def layout(self) -> Layout:
        """How its ranks lie on hosts and racks."""
        return Layout(self.gpus, self.replicas, self.gpus_per_host, self.hosts_per_rack)

    def with_gpus(self, gpus: int) -> Job:
        """The same model on more or fewer GPUs, in whole replicas, at least one: what is left over idles."""
        shards = self.gpus // self.replicas
        replicas = max(1, gpus // shards)
        return self.model_copy(update={"gpus": replicas * shards, "replicas": replicas})


class Failures(Section):
    """f as failures per GPU and day, and which share of them is of which kind."""

    per_gpu_day: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    shares: Mapping[Failure, Share]

    @model_validator(mode="after")
    def _add_up(self) -> Self:
        if self.per_gpu_day > 1:
            raise ValueError(
                f"per_gpu_day is {self.per_gpu_day:g}: does each GPU fail more than once a day, or is that a "
                "rate per month, per year, or of the whole job?"
            )
        if not math.isclose(total := sum(self.shares.values()), 1, abs_tol=1e-6):
            raise ValueError(f"shares add up to {total:g}, not to 1")
        return self

    @property
    def rate(self) -> float:
        """f, per GPU and second."""
        return self.per_gpu_day / SECONDS_PER_DAY


class Prices(Section):
    """In dollars, or whatever money it is."""

    gpu_hour: Positive


class Devices(Section):
    """`spares`: idle GPUs; a failed one is a spare again after `repair_hours`."""

    spares: Annotated[int, Field(ge=0)]
    repair_hours: Positive


class Periodic(Section):
    """Checkpoints each so often, at the optimal frequency (eq. 3), that training waits for."""

    checkpoint_s: Positive
    """o."""
    detect_s: Seconds
    restore_s: Seconds
    """r: from when it is noticed until training goes on."""


class Backup(Section):
    """Images, or snapshots on storage: how often, what each costs training, how old it is when it counts."""

    every_s: Positive
    cost_s: Seconds
    durable_s: Seconds

    @property
    def overhead(self) -> float:
        """Seconds per useful second."""
        return self.cost_s / self.every_s

    @property
    def average_age_s(self) -> float:
        """Training that is done again when the newest is gone back to."""
        return self.durable_s + self.every_s / 2


class UserLevel(Section):
    """`understudy.jit`, or paper 001 §3."""

    checkpoint_s: Seconds
    detect_s: Seconds
    restore_s: Seconds
    overhead: Share
    """o_jit."""
    backup: Backup | None = None
    """Periodic checkpoints beside, for failures that leave no replica: the paper's PC_1/day."""


class Transparent(Section):
    """Paper 001 §4: one recovery for errors that leave the GPU, one for those that take it."""

    detect_s: Seconds
    transient_s: Seconds
    hard_s: Seconds
    overhead: Share
    backup: Backup | None = None


class Ours(Section):
    """This project: a detection per kind of failure, and its own time for each rung of the ladder."""

    overhead: Share
    detect_s: Mapping[Failure, Seconds]
    recovery_s: Mapping[PlanName, Seconds]
    shadows: bool
    """Whether state that no other rank has is copied to host memory."""
    restart_s: Seconds
    """When a job is given up: until its launcher has it training again, from what is stored."""
    images: Backup | None = None
    stored: Backup | None = None

    @model_validator(mode="after")
    def _known_rungs(self) -> Self:
        for name in self.recovery_s:
            if name not in RUNGS:
                known = ", ".join(rung.value for rung in RUNGS)
                raise ValueError(f"recovery_s.{name.value} is no recovery to time; there are {known}")
        return self

    @property
    def kept(self) -> Kept:
        """For the planner."""
        return Kept(self.images is not None, self.stored is not None, self.shadows)


class Simulation(Section):
    """What `--simulate` lets happen beside what the formulas assume."""

    law: Law
    shape: Positive = 1.0
    """Of the Weibull distribution; 1 is the exponential one."""
    bursts_per_rack_day: Annotated[float, Field(ge=0, le=24)] = 0.0
    """All hosts of a rack at one instant."""
    preempted_per_host_day: Annotated[float, Field(ge=0, le=24)] = 0.0
    notice_s: Seconds = 0.0
    """Before a host is taken away; with `move_s` or more, and spares, our ranks move in time."""
    move_s: Seconds = 0.0
    """That training stands still for a move."""
    trace: Path | None = None
    """CSV of Time and GPUs: devices that come and go, in place of `failures`."""


class Inputs(Section):
    """All of them.  A way whose section is not there is left out."""

    job: Job
    failures: Failures
    prices: Prices | None = None
    devices: Devices | None = None
    periodic: Periodic | None = None
    user_level: UserLevel | None = None
    transparent: Transparent | None = None
    ours: Ours | None = None
    simulation: Simulation | None = None

    @model_validator(mode="after")
    def _of_each_kind(self) -> Self:
        if self.ours is not None:
            for kind, share in self.failures.shares.items():
                if share and kind not in self.ours.detect_s:
                    raise ValueError(
                        f"ours.detect_s.{kind.value} is missing: {share:.0%} of failures are such"
                    )
        return self
