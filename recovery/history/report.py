"""The JSON summary of a run (`proxyrun --report FILE`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.recovery.drills.spec import Drill
from understudy.recovery.planning.facts import WISHES, FaultKind
from understudy.recovery.planning.planner import PlanName

PLANNED = tuple(kind.value for kind in WISHES)
_FACTS = ("fault", "rank", "step", "call", "phase", "plan", "reason", "evidence", "verified")
_SPLIT = ("detect_s", "restart_s", "copy_s", "communicators_s", "replay_s", "total_s")


def ended_with_peer(recovery: Any) -> bool:
    """Whether nothing was broken, but a rank waited for one whose program had ended."""
    return bool(recovery.plan == PlanName.END_WITH_PEER.value)


@dataclass(frozen=True)
class Counts:
    """What came of a job's recoveries; `last`: of its newest fault."""

    recovered: int
    given_up: int
    moves: int
    last: Any | None


def counts_of(recoveries: Sequence[Any]) -> Counts:
    """Moves, rehearsals, and ranks that ended with their peer, are no faults."""
    faults = [one for one in recoveries if one.fault not in PLANNED and not ended_with_peer(one)]
    recovered = sum(one.recovered for one in faults)
    moves = sum(one.fault == FaultKind.PLANNED_MOVE.value for one in recoveries)
    return Counts(recovered, len(faults) - recovered, moves, faults[-1] if faults else None)


def recovery_entry(recovery: Any) -> dict[str, Any]:
    """One recovery as it stands in the report."""
    entry: dict[str, Any] = {name: getattr(recovery, name) for name in ("id", "at_ms", *_FACTS)}
    entry |= {name: round(getattr(recovery, name), 6) for name in _SPLIT}
    return entry | {
        "stages": {name: round(seconds, 6) for name, seconds in recovery.stages.items()},
        "generation": recovery.generation,
        "copied_bytes": recovery.copied_bytes,
        "recovered": recovery.recovered,
        "planned": recovery.fault in PLANNED,
        "transfer": _transfer(recovery.transfer) if recovery.HasField("transfer") else None,
    }


def _transfer(transfer: Any) -> dict[str, Any]:
    """How a worker came to another host."""
    parts = ("dump_s", "ship_s", "restore_s", "switch_s", "total_s")
    names = ("source", "destination", "bytes")
    return {name: getattr(transfer, name) for name in names} | {
        part: round(getattr(transfer, part), 6) for part in parts
    }


def adoption_entry(adoption: Any) -> dict[str, Any]:
    """One adoption as it stands in the report."""
    names = ("at_ms", "former_pid", "pid", "ranks", "servers_lost", "recovery_redone")
    known = {name: getattr(adoption, name) for name in names}
    if adoption.former_host:
        known |= {"former_host": adoption.former_host, "host": adoption.host}
    return {"away_s": round(adoption.away_s, 6)} | known


def account_of_adoption(adoption: Any) -> str:
    """In words."""
    ranks = f"{adoption.ranks} rank{'s' if adoption.ranks != 1 else ''}"
    if adoption.former_host:
        parts = [
            f"host {adoption.former_host}, which led the job, was lost, and host {adoption.host} led it on "
            f"{adoption.away_s:.3f} s after its last sign of life: {ranks} had gone on"
        ]
    else:
        parts = [
            f"proxyd (pid {adoption.former_pid}) died, and another one (pid {adoption.pid}) adopted the job "
            f"{adoption.away_s:.3f} s later: {ranks} had gone on"
        ]
    if adoption.servers_lost:
        parts.append(f"device servers lost meanwhile: {adoption.servers_lost}")
    if adoption.recovery_redone:
        parts.append("a recovery was under way and was done again")
    return "; ".join(parts)


def account_of_different(count: int) -> str:
    """What it means that replayed values differ from those delivered before."""
    values = "replayed value differs" if count == 1 else "replayed values differ"
    return f"{count} {values} from what the program was given before: do not rely on its results"


def account_of_no_step(commits: int) -> str:
    """What a program is protected by whose optimizer is none that we know."""
    many = "1 commit was" if commits == 1 else f"{commits} commits were"
    return (
        f"no step of a torch.optim optimizer was seen, so {many} made by the length of the log: a "
        "fault replays what came after the last (UNDERSTUDY_AUTO_COMMIT_BYTES)"
    )


def drill_of(message: Any) -> Drill:
    """A drill as it came over the wire."""
    return Drill(message.kind, message.rank, message.step, message.call)


def summary(report: Any, command: list[str], status: int, wall_s: float) -> dict[str, Any]:
    """Everything worth keeping of a run; numbers of bytes and calls are medians over ranks and steps."""
    return {
        "command": command,
        "exit_status": status,
        "wall_s": round(wall_s, 6),
        "steps": report.steps,
        "automatic_commits": report.automatic_commits,
        "records": report.records,
        "calls_per_step": report.calls_per_step,
        "log_bytes_per_step": report.log_bytes_per_step,
        "adoptions": [adoption_entry(adoption) for adoption in report.adoptions],
        "recoveries": [recovery_entry(one) for one in report.recoveries if not ended_with_peer(one)],
        "ended_with_peer": [recovery_entry(one) for one in report.recoveries if ended_with_peer(one)],
        "faults": [
            {
                "kind": fault.drill.kind,
                "rank": fault.drill.rank,
                "step": fault.drill.step,
                "call": fault.drill.call,
                "fired": fault.fired,
            }
            for fault in report.faults
        ],
        "replies_compared": report.replies_compared,
        "replies_different": report.replies_different,
        "validations": report.validations,
        "not_replayable": report.not_replayable,
        "recent_calls": list(report.recent_calls),
        "ranks": [
            {
                "rank": rank.rank,
                "device": rank.device,
                "state": rank.state,
                "recoveries": rank.recoveries,
                "snapshots": rank.snapshots,
                "snapshot_s": round(rank.snapshot_s, 6),
                "snapshot_bytes": rank.snapshot_bytes,
            }
            for rank in report.ranks
        ],
    }


def write(path: Path, content: dict[str, Any]) -> None:
    """Write it, readably."""
    path.write_text(json.dumps(content, indent=2) + "\n")
