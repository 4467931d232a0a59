"""What of a job goes into the history, each as one line: see recorder.py."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from understudy.recovery.drills.spec import Drill
from understudy.recovery.history.recorder import Event, Kind
from understudy.recovery.history.report import (
    account_of_adoption,
    adoption_entry,
    counts_of,
    ended_with_peer,
    recovery_entry,
)
from understudy.recovery.planning.facts import FaultKind

_OF_WISHES = {FaultKind.PLANNED_MOVE.value: Kind.MOVE, FaultKind.REHEARSAL.value: Kind.DRILL}


def job_started(job: str, launcher: int, drills: Sequence[str]) -> Event:
    """`launcher`: 0 if its ranks come from another host."""
    by = f"by process {launcher}" if launcher else "ranks of it come from another host"
    more = f", {_count(len(drills), 'drill')} ordered" if drills else ""
    return Event(Kind.START, job, "job", by + more, more={"launcher": launcher, "drills": [*drills]})


def job_ended(job: str, why: str, report: Any, steps: int, disorderly: Collection[int]) -> Event:
    """`disorderly`: ranks whose program did not end its session itself."""
    of_recoveries = counts_of(report.recoveries)
    faults = of_recoveries.recovered + of_recoveries.given_up
    counts = {
        "step": steps,
        "recovery": faults,
        "move": of_recoveries.moves,
        "validation": report.validations,
        "adoption": len(report.adoptions),
    }
    told = [_count(number, name) for name, number in counts.items() if number or name == "step"]
    if report.replies_different:
        told.append(f"{report.replies_different} replayed values DIFFERED")
    ends = "in order"
    if disorderly:
        ends = f"not in order: rank {', '.join(map(str, sorted(disorderly)))}"
    more = {
        "why": why, "steps": steps, "recoveries": faults,
        "given_up": of_recoveries.given_up, "moves": counts["move"],
        "validations": report.validations, "adoptions": len(report.adoptions),
        "drills_fired": sum(one.fired for one in report.faults),
        "replies_different": report.replies_different, "not_replayable": report.not_replayable,
        "disorderly": sorted(disorderly),
    }  # fmt: skip
    return Event(Kind.END, job, "job", f"{ends}; {', '.join(told)}", more=more)


def recovery_made(job: str, recovery: Any) -> Event:
    """Or a move, or what somebody ordered as a drill."""
    kind = _OF_WISHES.get(recovery.fault, Kind.RECOVERY)
    outcome = "moved" if kind is Kind.MOVE else "recovered"
    if ended_with_peer(recovery):
        outcome = "ended with its peer"
    elif not recovery.recovered:
        outcome = "given up"
    return Event(
        kind, job, recovery.fault, outcome, recovery.id, recovery.rank, recovery.step, recovery.total_s,
        at_ms=recovery.at_ms, more=recovery_entry(recovery),
    )  # fmt: skip


def worker_moved(job: str, rank: int, step: int, seconds: float, account: str) -> Event:
    """In place: it goes on as another process of this host."""
    return Event(Kind.MOVE, job, "worker", "moved", "", rank, step, seconds, more={"account": account})


def drill_told(job: str, drill: Drill, step: int, fired: bool = True) -> Event:
    """The event of a drill that fired, `step` being where its rank stood, or had not when its job ended."""
    return Event(
        Kind.DRILL, job, drill.kind, "fired" if fired else "never fired", rank=drill.rank,
        step=drill.step or step, more={"call": drill.call},
    )  # fmt: skip


def move_failed(job: str, rank: int, step: int, problem: str) -> Event:
    """A rank is where it was."""
    return Event(
        Kind.MOVE, job, FaultKind.PLANNED_MOVE.value, "stayed", rank=rank, step=step, more={"reason": problem}
    )


def adopted(adoption: Any) -> Event:
    """By a successor of a proxyd that died, or by another host."""
    what = f"host {adoption.host}" if adoption.host else f"proxyd {adoption.pid}"
    former = f"host {adoption.former_host}" if adoption.former_host else f"proxyd {adoption.former_pid}"
    return Event(
        Kind.ADOPTION, adoption.job, what, f"{_count(adoption.ranks, 'rank')} of {former}",
        seconds=adoption.away_s, at_ms=adoption.at_ms,
        more=adoption_entry(adoption) | {"account": account_of_adoption(adoption)},
    )  # fmt: skip


def validation_failed(job: str, rank: int, step: int, message: str) -> Event:
    """Computed again, something came out differently."""
    return Event(Kind.VALIDATION, job, "replay", "DIFFERS", rank=rank, step=step, more={"reason": message})


def _count(number: int, name: str) -> str:
    plural = {"recovery": "recoveries"}.get(name, f"{name}s")
    return f"{number} {name if number == 1 else plural}"
