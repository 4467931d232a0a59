"""What was measured, as inputs of a bill: recoveries by their rung, what noticing took, steps, failures."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from understudy.recovery.base.errors import BadInput
from understudy.recovery.costs.given.inputs import RUNGS, SECONDS_PER_DAY
from understudy.recovery.costs.given.reading import Known, Name
from understudy.recovery.costs.models.rungs import FAULT_OF, Failure
from understudy.recovery.planning.facts import FaultKind
from understudy.recovery.planning.planner import PlanName

LARGEST_FILE = 64 << 20
KIND_OF: Mapping[str, Failure] = {
    **{fault.value: failure for failure, fault in FAULT_OF.items()},
    FaultKind.SERVER_STOPPED.value: Failure.SERVER,
    FaultKind.SERVER_HUNG.value: Failure.SERVER,
    FaultKind.COLLECTIVE_HUNG.value: Failure.TRANSIENT,
    FaultKind.CALL_FAILED.value: Failure.TRANSIENT,
}
"""What was noticed -> the kind of failure that operators count it as."""
_SAME_AS = {PlanName.ROLL_FORWARD.value: PlanName.RESTART_COPY_REPLAY.value}


def of_file(path: Path) -> dict[Name, Known]:
    """JSON that `make bench` or `proxyrun --report` has written.  Raises BadInput."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise BadInput(
                f"{path} is larger than {LARGEST_FILE >> 20} MiB: nothing of ours writes such a file"
            )
        content = json.loads(path.read_text())
    except OSError as problem:
        raise BadInput(f"{path} cannot be read: {problem.strerror}") from problem
    except (ValueError, RecursionError) as problem:
        raise BadInput(f"{path} is no JSON: {problem}") from None
    if not isinstance(content, dict) or not isinstance(content.get("recoveries"), list):
        raise BadInput(f"{path} has no recoveries: it must be of make bench or of proxyrun --report")
    machine = f" (commit {content['commit']}, {content.get('cpu')})" if "commit" in content else ""
    found = of_recoveries(_entries(content["recoveries"]), f"{path}{machine}")
    return found | _overhead(content, f"{path}{machine}")


def _entries(recoveries: Iterable[Any]) -> Iterable[Any]:
    """`make bench` has those of each fault together."""
    for one in recoveries:
        yield from one["all"] if isinstance(one, dict) and isinstance(one.get("all"), list) else (one,)


def of_recoveries(entries: Iterable[Any], origin: str) -> dict[Name, Known]:
    """Medians of recoveries as reports and the history have them; what makes no sense is left out.

    Replay is not among a rung's seconds: the formulas reckon what is done again by themselves.
    """
    noticed: dict[Failure, list[float]] = defaultdict(list)
    took: dict[str, list[float]] = defaultdict(list)
    for entry in entries:
        if not isinstance(entry, dict) or entry.get("recovered") is not True or entry.get("planned") is True:
            continue
        parts = [_duration(entry.get(name)) for name in ("total_s", "detect_s", "replay_s")]
        if None in parts:
            continue
        total, detect, replay = (part or 0.0 for part in parts)
        plan = _SAME_AS.get(entry.get("plan", ""), entry.get("plan"))
        if (kind := KIND_OF.get(entry.get("fault", ""))) is not None:
            noticed[kind].append(detect)
        if plan in {rung.value for rung in RUNGS}:
            took[plan].append(max(0.0, total - detect - replay))
    found: dict[Name, Known] = {}
    for kind, all_ in noticed.items():
        found["ours", "detect_s", kind.value] = _median(all_, origin)
    for plan, all_ in took.items():
        found["ours", "recovery_s", plan] = _median(all_, origin)
    return found


def _median(values: Sequence[float], origin: str) -> Known:
    return Known(statistics.median(values), f"median of {len(values)}, {origin}")


def _duration(value: Any) -> float | None:
    """None: it is no number of seconds."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e7
    return float(value) if fits else None


def _overhead(content: Mapping[str, Any], origin: str) -> dict[Name, Known]:
    """What `make bench` measured: how much longer a step of two ranks takes; never less than nothing."""
    rows = content.get("step_times")
    ratios = [
        row["ratio"]
        for row in (rows if isinstance(rows, list) else ())
        if isinstance(row, dict) and row.get("ranks") == 2 and _duration(row.get("ratio")) is not None
    ]
    if not ratios:
        return {}
    known = Known(max(0.0, statistics.median(ratios) - 1), f"step times of two ranks, {origin}")
    return {("ours", "overhead"): known}


# ------------------------------------------------------------------ a running job
def of_job(name: str, ranks: Sequence[Any], recoveries: Sequence[Any], seconds: float) -> dict[Name, Known]:
    """`ranks`: of its status; `recoveries`: entries of its history, in so many seconds since it began."""
    origin = f"running job {name}"
    found: dict[Name, Known] = {("job", "gpus"): Known(len(ranks), origin)}
    paces = [rank.step_s for rank in ranks if rank.step_s > 0]
    if paces:
        found["job", "minibatch_s"] = Known(
            statistics.median(paces), f"median of {len(paces)} ranks, {origin}"
        )
    faults = [one for one in recoveries if isinstance(one, dict) and one.get("planned") is not True]
    days = len(ranks) * seconds / SECONDS_PER_DAY
    if faults and days > 0:
        many = f"{len(faults)} faults in {days:.3g} days of a rank"
        found["failures", "per_gpu_day"] = Known(len(faults) / days, f"{many}, {origin}")
        kinds = [KIND_OF[one["fault"]] for one in faults if one.get("fault") in KIND_OF]
        for kind in set(kinds):
            share = kinds.count(kind) / len(kinds)
            found["failures", "shares", kind.value] = Known(share, f"{many}, {origin}")
    return found | of_recoveries(recoveries, origin)
