"""What a campaign has left in its folder: its plan, and each run's record, checked as it is read.

Anybody may have written these files. A plan that cannot be read ends a report; a run that cannot is a
finding, which its suite's gate shows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from understudy.campaigns.files import content, short
from understudy.campaigns.planning.faults import Fault
from understudy.campaigns.planning.schedules import Schedule
from understudy.campaigns.planning.variants import VARIANTS
from understudy.campaigns.results.records import PARTS, Run
from understudy.campaigns.running.manifest import LARGEST_FILE, MANIFEST, RECORD
from understudy.recovery.base.errors import BadInput

RUNS = "runs"
LEAST_S, MOST = 1e-6, 1e9
"""Seconds of a training, at least; seconds and steps, at most: beyond them arithmetic ends in infinities."""


class Key(NamedTuple):
    """Which run."""

    suite: str
    variant: str
    seed: int

    @property
    def folder(self) -> str:
        """Its name, below RUNS."""
        return f"{self.suite}--{self.variant}--{self.seed}"

    def __str__(self) -> str:
        return f"{self.variant} with seed {self.seed}"


class _Written(BaseModel):
    """Of a plan: only what a report shows is read, so that reports outlive new keys."""

    model_config = ConfigDict(extra="ignore", frozen=True)


Name = Field(pattern=r"^[^/\x00-\x1f]{1,150}$")


class PlannedSuite(_Written):
    """As the campaign's file had it. `schedule` stays as it was written: what a trace is read from may be gone."""

    name: str = Name
    data: str | None = None
    model: str | None = None
    command: str = ""
    schedule: Mapping[str, Any] = Field(default_factory=dict)
    checkpoint_every: int | None = None
    max_in_flight: int | None = None
    storage: str | None = None

    @property
    def training(self) -> str:
        """As spec.Suite has it."""
        return self.command or f"{self.data}-{self.model}"

    @property
    def varies_a_knob(self) -> bool:
        """Whether it is there for interval, snapshots in flight or storage (paper 002 §9), and no aggregate's."""
        return any(knob is not None for knob in (self.checkpoint_every, self.max_in_flight, self.storage))

    @property
    def kind(self) -> str:
        """Of its schedule."""
        return str(self.schedule.get("kind", "unknown"))


class PlannedCampaign(_Written):
    """Times in seconds."""

    name: str
    seeds: tuple[int, ...]
    ranks: int = Field(ge=1)
    global_batch: int
    steps: int = Field(ge=1)
    checkpoint_every: int
    max_in_flight: int = 4
    storage: str = "disk"
    suites: tuple[PlannedSuite, ...]


class PlannedRun(_Written):
    """Which run there is to be."""

    suite: str = Name
    variant: str = Name
    seed: int


class Machine(_Written):
    """Where it ran."""

    cpu: str = "unknown"
    cores: int = 0
    torch: str = "unknown"
    python: str = "unknown"
    kernel: str = "unknown"


class Plan(_Written):
    """`campaign.json`."""

    campaign: PlannedCampaign
    digest: str = ""
    commit: str = "unknown"
    machine: Machine = Machine()
    began: str = "unknown"
    runs: tuple[PlannedRun, ...]


@dataclass(frozen=True)
class Results:
    """`unread`: planned runs without a record that can be relied on, and why, as a sentence's second half."""

    plan: Plan
    runs: Mapping[Key, Run]
    unread: Mapping[Key, str]
    unplanned: Sequence[str] = ()
    """Folders of runs that the plan does not have."""

    @cached_property
    def suites(self) -> Mapping[str, PlannedSuite]:
        """By name; those of undisturbed runs are not among them."""
        return {suite.name: suite for suite in self.plan.campaign.suites}

    @cached_property
    def planned(self) -> Mapping[str, Sequence[Key]]:
        """The keys of each suite, undisturbed ones last, in the plan's order."""
        found: dict[str, list[Key]] = {}
        for one in self.plan.runs:
            found.setdefault(one.suite, []).append(Key(one.suite, one.variant, one.seed))
        order = {name: place for place, name in enumerate(self.suites)}
        return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))

    @cached_property
    def variants(self) -> Sequence[str]:
        """In the order of VARIANTS; unknown ones behind."""
        order = {name: place for place, name in enumerate(VARIANTS)}
        found = dict.fromkeys(one.variant for one in self.plan.runs)
        return tuple(sorted(found, key=lambda name: order.get(name, len(order))))

    def scheduled(self, suite: str, seed: int) -> Sequence[Fault] | None:
        """The faults that a run of it was to have; None where that cannot be told (its trace is gone)."""
        planned = self.suites.get(suite)
        if planned is None:
            return ()
        try:
            # A field's own name and its name in a campaign's file are both read.
            written = {name.removesuffix("_"): value for name, value in planned.schedule.items()}
            schedule = _SCHEDULES.validate_python(written)
            return schedule.faults(self.plan.campaign.steps, self.plan.campaign.ranks, seed)
        except (ValueError, OSError):
            return None


_SCHEDULES: TypeAdapter[Schedule] = TypeAdapter(Schedule)


def read(folder: Path) -> Results:
    """Raises BadInput where there is no campaign, or its plan is damaged."""
    try:
        plan = Plan.model_validate_json(content(folder / MANIFEST, LARGEST_FILE))
    except FileNotFoundError:
        raise BadInput(f"{folder} has no {MANIFEST}: it is no folder of a campaign") from None
    except (OSError, ValueError) as problem:
        raise BadInput(f"{folder / MANIFEST} cannot be read: {short(problem)}") from None
    runs: dict[Key, Run] = {}
    unread: dict[Key, str] = {}
    for one in plan.runs:
        key = Key(one.suite, one.variant, one.seed)
        try:
            run = Run.model_validate_json(content(folder / RUNS / key.folder / RECORD, LARGEST_FILE))
        except FileNotFoundError:
            unread[key] = f"has no {RECORD}"
        except (OSError, ValueError) as problem:
            unread[key] = f"has a {RECORD} that cannot be read: {short(problem)}"
        else:
            wrong = unsound(run, key)
            if wrong:
                unread[key] = f"has a {RECORD} that cannot be so: {wrong}"
            else:
                runs[key] = run
    known = {Key(one.suite, one.variant, one.seed).folder for one in plan.runs}
    there = sorted(path.name for path in (folder / RUNS).glob("*--*--*"))
    return Results(plan, runs, unread, tuple(name for name in there if name not in known))


def unsound(run: Run, key: Key) -> str:
    """What cannot be so in a record that has the right form; empty if nothing."""
    if (run.suite, run.variant, run.seed) != key:
        return f"it is of {run.suite}, {run.variant} with seed {run.seed}"
    seconds = {
        "wall": run.wall,
        "starting": run.starting,
        "ending": run.ending,
        "step_seconds": run.step_seconds,
        "stall": run.checkpoints.stall,
        "snapshot": run.checkpoints.snapshot,
        "write": run.checkpoints.write,
        "backpressure": run.checkpoints.backpressure,
        **run.parts,
    }
    for name, value in seconds.items():
        if not 0 <= value <= MOST:
            return f"{name} is {value} s"
    if 0 < run.training_seconds < LEAST_S:
        return f"its steps took {run.training_seconds} s"
    if not math.isfinite(run.unaccounted) or not math.isfinite(run.load):
        return "a number is not finite"
    if strange := sorted(set(run.parts) - set(PARTS)):
        return f"{strange[0]!r} is no part of a run's time"
    for span in run.timeline:
        if not (math.isfinite(span.since) and math.isfinite(span.until) and span.since <= span.until):
            return f"{span.what} lasts from {span.since} to {span.until} s"
    for recovery in run.recoveries:
        if not all(math.isfinite(value) for value in (recovery.total, *recovery.parts.values())):
            return "a recovery's time is not finite"
    counts = Counter(steps=run.steps, target=run.target, redone=run.redone)
    return next((f"{name} is {count}" for name, count in counts.items() if not 0 <= count <= MOST), "")
