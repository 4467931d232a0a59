"""Campaigns that never ran: records of runs as a runner writes them, for tests of gates and reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from understudy.campaigns.planning.faults import Fault
from understudy.campaigns.planning.spec import Campaign
from understudy.campaigns.report.results import RUNS, Key
from understudy.campaigns.results.records import (
    Attempt,
    Checkpoints,
    Comparison,
    FaultSeen,
    Recovery,
    Run,
    Samples,
    Span,
)
from understudy.campaigns.running.manifest import MANIFEST, RECORD, Planned, planned_runs

STEPS = 40
SEEDS = (1, 2, 3)
STEP_S = {"bare": 0.05, "blocking": 0.05, "overlapped": 0.051, "jit": 0.0505, "transparent": 0.052}
PROXIED = ("transparent", "transparent+persist")
AWAY_S = {**dict.fromkeys(PROXIED, 0.25), "jit": 3.0}
"""From a fault until the training is back; of all others 4 s."""
SUITES: tuple[dict[str, Any], ...] = (
    {"name": "gpt-fixed", "data": "sources", "model": "gpt", "schedule": {"kind": "steps", "at": [12, 30]}},
    {
        "name": "convnet-records",
        "data": "digits",
        "model": "convnet",
        "schedule": {"kind": "records", "count": 2},
    },
)
VARIANTS = ("bare", "blocking", "overlapped", "jit", "transparent", "torchft")


def campaign(suites: Sequence[dict[str, Any]] = SUITES, **more: Any) -> Campaign:
    """Of YAML's form."""
    made: dict[str, Any] = {
        "name": "made-up",
        "seeds": SEEDS,
        "global_batch": 32,
        "steps": STEPS,
        "checkpoint_every": 10,
        "suites": suites,
        "variants": VARIANTS,
    }
    return Campaign.model_validate(made | more)


@dataclass
class MadeUp:
    """A campaign and its runs, which a test may spoil before it writes them."""

    campaign: Campaign = field(default_factory=campaign)
    runs: dict[Key, dict[str, Any]] = field(default_factory=dict)
    planned: list[Key] = field(default_factory=list)

    @classmethod
    def complete(cls, made: Campaign | None = None) -> MadeUp:
        """All runs done, all gates passed; torchft is absent."""
        self = cls(made or campaign())
        for run in planned_runs(self.campaign):
            self.add(run_of(self.campaign, run))
        return self

    def add(self, run: Run) -> None:
        key = Key(run.suite, run.variant, run.seed)
        self.planned.append(key)
        self.runs[key] = run.artifacts()

    def spoil(self, suite: str, variant: str, seed: int, **fields: Any) -> Key:
        """Other values for a record's fields; lists and mappings as a whole."""
        key = Key(suite, variant, seed)
        self.runs[key] |= fields
        return key

    def write(self, folder: Path) -> Path:
        """As the runner does."""
        plan = {
            "campaign": self.campaign.model_dump(mode="json", by_alias=True),
            "digest": "0123abcd",
            "commit": "abc1234",
            "machine": {
                "cpu": "a processor",
                "cores": 2,
                "torch": "2.13.0",
                "python": "3.11.7",
                "kernel": "6.1",
            },
            "began": "2026-11-28T04:20:00+00:00",
            "runs": [key._asdict() for key in self.planned],
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).write_text(json.dumps(plan))
        for key, run in self.runs.items():
            (folder / RUNS / key.folder).mkdir(parents=True)
            (folder / RUNS / key.folder / RECORD).write_text(json.dumps(run))
        return folder


def run_of(made: Campaign, planned: Planned) -> Run:
    """One that is as it should be, with noise of a few percent drawn from its seed."""
    suite, variant, seed = planned.suite, planned.variant, planned.seed
    struck = planned.name == suite.name
    chance = Random(f"{planned.folder}")
    faults = suite.schedule.faults(made.steps, made.ranks, seed) if struck else []
    base: dict[str, Any] = {
        "suite": planned.name,
        "training": suite.training,
        "data": suite.data or "",
        "model": suite.model or suite.name,
        "schedule": suite.schedule.kind if planned.disturbed else "none",
        "variant": variant,
        "seed": seed,
        "disturbed": planned.disturbed,
        "target": made.steps,
    }
    if variant in ("torchft", "nvrx"):
        return Run(**base, status="absent", why="ImportError: libtorchft.so: cannot open shared object file")
    impossible = next((why for fault in faults if (why := _meets(variant, fault))), "")
    if impossible:
        return Run(**base, status="impossible", why=impossible)
    course = _Course(variant, made, STEP_S.get(variant, 0.05) * (1 + 0.03 * chance.random()))
    course.run(faults)
    written = variant in ("blocking", "overlapped", "dcp-async", "torchrun")
    wall = 1.5 + course.now + 0.1
    unaccounted = course.now - sum(course.parts.values())
    reference = variant == "bare" and not struck
    return Run(
        **base,
        status="done",
        steps=made.steps,
        wall=wall,
        starting=1.5,
        ending=0.1,
        parts=course.parts,
        unaccounted=unaccounted,
        timeline=tuple(course.spans),
        attempts=tuple(course.attempts()),
        faults=tuple(course.seen),
        recoveries=tuple(course.recoveries),
        step_seconds=course.step_s,
        redone=course.redone,
        checkpoints=Checkpoints(
            count=made.steps // 10,
            snapshot=course.parts.get("snapshot", 0.0),
            write=course.parts.get("write", 0.0),
            stall=course.parts.get("snapshot", 0.0) + course.parts.get("write", 0.0),
            bytes=10_000_000,
        )
        if written
        else Checkpoints(),
        samples=Samples(exact=True, sentence="exact") if suite.data else None,
        comparison=None
        if reference
        else Comparison(
            parameters_equal=True,
            losses_equal=True,
            loss_difference=0.0,
            distances={10: 0.0, made.steps: 0.0},
        ),
        load=0.4 + chance.random(),
    )


def _meets(variant: str, fault: Fault) -> str:
    from understudy.campaigns.planning.variants import VARIANTS as KNOWN

    return KNOWN[variant].meets(fault)


@dataclass
class _Course:
    """A run as it goes on; seconds since its first step began."""

    variant: str
    made: Campaign
    step_s: float
    now: float = 0.0
    redone: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    seen: list[FaultSeen] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def spend(self, what: str, seconds: float) -> None:
        begin = 1.5 + self.now
        self.now += seconds
        self.parts[what] = self.parts.get(what, 0.0) + seconds
        self.spans.append(Span(what=what, since=begin, until=begin + seconds))

    def run(self, faults: Sequence[Fault]) -> None:
        write_s = {"blocking": 0.06, "overlapped": 0.008}.get(self.variant, 0.0)
        for step in range(1, self.made.steps + 1):
            for fault in (one for one in faults if one.step == step):
                self.seen.append(
                    FaultSeen(
                        kind=fault.kind,
                        step=step,
                        rank=fault.rank,
                        place=fault.place,
                        fired=True,
                        at=1.5 + self.now,
                    )
                )
                self.back(fault, step)
            self.spend("compute", self.step_s)
            self.now += 0.0004  # what nobody accounts for
            if step % 10 == 0 and write_s:
                self.spend("snapshot", 0.004)
                self.spend("write", write_s)
        self.ends.append(1.5 + self.now)

    def back(self, fault: Fault, step: int) -> None:
        before = self.now
        away = AWAY_S.get(self.variant, 4.0)
        self.spend("detect", 0.1 * away)
        self.ends.append(1.5 + self.now)
        if self.variant in PROXIED:
            in_place = fault.kind == "error"
            self.spend("restart", 0.2 * away)
            self.spend("copy", 0.0 if in_place else 0.2 * away)
            self.spend("communicators", 0.2 * away)
            self.spend("replay", 0.3 * away)
            plan = "rewind-in-place" if in_place else "restart-copy-replay"
        else:
            self.spend("restart", 0.7 * away)
            self.spend("communicators", 0.1 * away)
            self.spend("copy", 0.1 * away)
            plan = "restart"
            again = 0 if self.variant == "jit" else step - 1 if self.variant == "bare" else (step - 1) % 10
            self.redone += again
            self.spend("redone", again * self.step_s)
        parts = {one.what: one.until - one.since for one in self.spans if one.since >= 1.5 + before - 1e-9}
        self.recoveries.append(
            Recovery(fault=fault.kind, rank=fault.rank, plan=plan, total=sum(parts.values()), parts=parts)
        )

    def attempts(self) -> list[Attempt]:
        if self.variant in PROXIED:
            return [Attempt(ranks=self.made.ranks, began=0.0, ended=self.ends[-1], status=0)]
        starts = [0.0, *self.ends[:-1]]
        last = len(self.ends) - 1
        return [
            Attempt(ranks=self.made.ranks, began=began, ended=ended, status=0 if place == last else 1)
            for place, (began, ended) in enumerate(zip(starts, self.ends, strict=True))
        ]
