"""What each way of recovering wastes per GPU and useful second: equations 1 to 8, and ours likewise."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from understudy.recovery.base.errors import BadInput
from understudy.recovery.costs.given.inputs import Backup, Inputs, Job, Ours
from understudy.recovery.costs.models.formulas import Real, optimal_frequency, wasted_fraction
from understudy.recovery.costs.models.rungs import Failure, Ladder
from understudy.recovery.planning.planner import PlanName

Section = TypeVar("Section")


class Way(Enum):
    """The value is its section in a file."""

    PERIODIC = "periodic"
    USER_LEVEL = "user_level"
    TRANSPARENT = "transparent"
    OURS = "ours"


@dataclass(frozen=True)
class Waste(Generic[Real]):
    """Seconds per GPU and useful second, by what they go to; each a float, or an array over N."""

    steady: Real
    """Without any failure: checkpoints, interception, logging."""
    detection: Real
    recovery: Real
    redone: Real
    """Training that is done again."""

    @property
    def total(self) -> Real:
        """w of eq. 5."""
        return self.steady + self.detection + self.recovery + self.redone

    @property
    def fraction(self) -> Real:
        """w_f of eq. 6."""
        return wasted_fraction(self.total)


@dataclass(frozen=True)
class Terms:
    """What a way costs: its steady overhead, and what a failure costs every GPU, seconds."""

    steady: float
    """Seconds per useful second."""
    detection: float
    recovery: float
    redone: float
    checkpoint: float = 0.0
    """o, of a way that takes checkpoints at the optimal frequency (eq. 3)."""

    def waste(self, rate: Real) -> Waste[Real]:
        """With so many failures of the whole job per second, N f."""
        checkpoints = self.frequency(rate) * self.checkpoint
        return Waste(
            self.steady + checkpoints,
            rate * self.detection,
            rate * self.recovery,
            rate * self.redone + checkpoints,
        )

    def frequency(self, rate: Real) -> Real:
        """c*, checkpoints per second (eq. 3); 0 for a way that takes none."""
        return optimal_frequency(rate, 1.0, self.checkpoint) if self.checkpoint else 0 * rate


def waste_of(way: Way, inputs: Inputs) -> Waste[float]:
    """What the file's own job wastes.  Raises BadInput if the way is not given, or its waste has no bound."""
    return terms_of(way, inputs, inputs.job).waste(inputs.job.gpus * inputs.failures.rate)


def terms_of(way: Way, inputs: Inputs, job: Job) -> Terms:
    """They depend on the job only by whether it has replicas, and hosts.  Raises BadInput."""
    match way:
        case Way.PERIODIC:
            every = _given(inputs.periodic, way)
            return Terms(0.0, every.detect_s, every.restore_s, 0.0, every.checkpoint_s)
        case Way.USER_LEVEL:
            saves = _given(inputs.user_level, way)
            _refuse_without_replica(way, job)
            # All ranks wait for checkpoint and restore: formulas.py says where eq. 7 differs.
            recovery = saves.checkpoint_s + saves.restore_s
            return Terms(
                saves.overhead + backup_overhead(saves.backup), saves.detect_s, recovery, job.minibatch_s / 2
            )
        case Way.TRANSPARENT:
            paper = _given(inputs.transparent, way)
            _refuse_without_replica(way, job)
            hard = sum(share for kind, share in inputs.failures.shares.items() if kind.takes_devices)
            recovery = hard * paper.hard_s + (1 - hard) * paper.transient_s
            return Terms(
                paper.overhead + backup_overhead(paper.backup), paper.detect_s, recovery, job.minibatch_s / 2
            )
        case Way.OURS:
            ours = _given(inputs.ours, way)
            kinds = [(kind, share) for kind, share in inputs.failures.shares.items() if share]
            losses = [(share, loss_of(ours, job, kind)) for kind, share in kinds]
            return Terms(
                steady_overhead(ours),
                sum(share * loss.detection for share, loss in losses),
                sum(share * loss.recovery for share, loss in losses),
                sum(share * loss.redone for share, loss in losses),
            )


def steady_overhead(ours: Ours) -> float:
    """Seconds per useful second."""
    return ours.overhead + backup_overhead(ours.images) + backup_overhead(ours.stored)


def backup_overhead(kept: Backup | None) -> float:
    """Seconds per useful second."""
    return 0.0 if kept is None else kept.overhead


@dataclass(frozen=True)
class Loss:
    """What one failure costs every GPU, seconds."""

    rung: PlanName
    detection: float
    recovery: float
    redone: float


def loss_of(ours: Ours, job: Job, kind: Failure) -> Loss:
    """What a single failure costs, with spares enough.  Raises BadInput if its rung has no time."""
    rung = rung_of_one(ours, job, kind)
    kept = gone_back_to(ours, rung)
    if rung is PlanName.GIVE_UP:
        if kept is None:
            raise BadInput(
                f"one failure of kind {kind.value} would end the job, and nothing is stored to begin "
                "from again: give ours.stored (proxyd --persist), or ours.images for hosts"
            )
        return Loss(rung, ours.detect_s[kind], ours.restart_s, kept.average_age_s)
    redone = job.minibatch_s / 2 if kept is None else kept.average_age_s
    return Loss(rung, ours.detect_s[kind], recovery_s(ours, rung, kind), redone)


def rung_of_one(ours: Ours, job: Job, kind: Failure) -> PlanName:
    """Where a failure of this kind leads, with spares enough: of the last rank, or of its host."""
    layout = job.layout
    last = layout.gpus - 1
    ranks = layout.on_host(layout.host_of(last)) if kind is Failure.HOST else (last,)
    return Ladder(layout, ours.kept).rung(dict.fromkeys(ranks, kind), free_devices=len(ranks))


def recovery_s(ours: Ours, rung: PlanName, kind: Failure) -> float:
    """Raises BadInput where the file has none."""
    if rung not in ours.recovery_s:
        raise BadInput(f"ours.recovery_s.{rung.value} is missing: failures of kind {kind.value} lead there")
    return ours.recovery_s[rung]


def gone_back_to(ours: Ours, rung: PlanName) -> Backup | None:
    """What this rung begins from again; None: from the begin of the minibatch."""
    if rung is PlanName.RESTORE_SNAPSHOT_REPLAY:
        return ours.images
    return ours.stored if rung in (PlanName.RESTORE_STORED_REPLAY, PlanName.GIVE_UP) else None


def _given(section: Section | None, way: Way) -> Section:
    if section is None:
        raise BadInput(f"{way.value} is not given")
    return section


def _refuse_without_replica(way: Way, job: Job) -> None:
    if job.replicas == 1:
        raise BadInput(
            f"{way.value} needs two replicas or more: state that one rank alone has is lost with it"
        )
