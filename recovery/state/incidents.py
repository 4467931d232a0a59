"""Faults as they were noticed, and what is told of an incident once it is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from understudy.protos import control_pb2 as pb
from understudy.recovery.planning.facts import ECHOES, FaultKind, Phase
from understudy.recovery.planning.planner import ENDS, PlanName
from understudy.recovery.state.jobs import Job

CALLS = (FaultKind.CALL_FAILED, FaultKind.DRIVER_SUSPECT)
"""A server stands at a record that failed: replay has to get past it."""


@dataclass(frozen=True)
class Fault:
    """One thing that went wrong.  Times are CLOCK_MONOTONIC in ns; `drill`: we caused it ourselves."""

    kind: FaultKind
    rank: int
    step: int
    call: int
    phase: Phase
    record_index: int
    message: str
    happened_ns: int
    noticed_ns: int
    drill: bool
    evidence: str


@dataclass(frozen=True)
class Outcome:
    """What was done about an incident.

    `marks`: when servers were attached, state was restored, ranks were resumed, and all was over
    (CLOCK_MONOTONIC, ns).
    """

    plan: PlanName
    reason: str
    generation: int
    copied_bytes: int
    values_compared: int
    values_different: int
    marks: Sequence[int]
    stages: Mapping[str, float]
    """What each stage took, seconds, in all rounds."""

    @property
    def recovered(self) -> bool:
        """Whether the job goes on."""
        return self.plan not in ENDS

    @property
    def verified(self) -> str:
        """How it was checked that the outcome is right, in words."""
        if self.plan is PlanName.END_WITH_PEER:
            return "there was nothing to bring back"
        if not self.recovered:
            return "not at all: the job was given up"
        parts = ["every rank is back at the record where it stood"]
        if self.copied_bytes:
            parts.append(f"{self.copied_bytes} copied bytes have the digests of the commit")
        if self.values_different:
            share = f"{self.values_different} of {self.values_compared}"
            parts.append(f"{share} replayed values DIFFER from those delivered before")
        elif self.values_compared:
            parts.append(f"{self.values_compared} replayed values equal those delivered before")
        else:
            parts.append("no value had been delivered since the commit")
        return "; ".join(parts)


def causes_of(faults: Sequence[Fault]) -> list[Fault]:
    """Without the echoes on other ranks, if there is anything else."""
    return [fault for fault in faults if fault.kind not in ECHOES] or list(faults)


def told_of(faults: Sequence[Fault]) -> list[Fault]:
    """What is told of one incident: a call that fails again in the replay is the same fault.

    A collective that failed because of what happened to a peer is its echo, not a fault of its own.
    """
    told: list[Fault] = []
    for fault in causes_of(faults):
        if fault.kind not in CALLS or all(fault.rank != o.rank or o.kind not in CALLS for o in told):
            told.append(fault)
    return told


def with_tried(reason: str, plan: PlanName, tried: Sequence[str]) -> str:
    """A plan's reason, and which other plans came before it in the same incident."""
    others = [name for name in tried[:-1] if name != plan.value]
    return f"{reason}; tried before: {', '.join(others)}" if others else reason


def entry_of(fault: Fault, outcome: Outcome) -> pb.Recovery:
    """For the report.  Faults of one incident share what was done; each has its own notice."""
    points = [max(mark, fault.noticed_ns) for mark in outcome.marks]
    spans = [(end - start) / 1e9 for start, end in zip([fault.noticed_ns, *points], points, strict=False)]
    return pb.Recovery(
        fault=fault.kind.value, rank=fault.rank, step=fault.step, call=fault.call, phase=fault.phase.value,
        plan=outcome.plan.value, reason=outcome.reason,
        detect_s=max(0, fault.noticed_ns - fault.happened_ns) / 1e9,
        restart_s=spans[0], copy_s=spans[1], communicators_s=spans[2], replay_s=spans[3],
        total_s=max(0, points[-1] - fault.happened_ns) / 1e9,
        generation=outcome.generation, copied_bytes=outcome.copied_bytes, recovered=outcome.recovered,
        evidence=fault.evidence, verified=outcome.verified, stages=outcome.stages,
    )  # fmt: skip


def with_transfer(entry: pb.Recovery, job: Job) -> pb.Recovery:
    """And how its worker came to another host, if it had to; told once."""
    session = job.sessions.get(entry.rank)
    if session is not None and session.transfer is not None:
        entry.transfer.CopyFrom(session.transfer)
        session.transfer = None
    return entry
