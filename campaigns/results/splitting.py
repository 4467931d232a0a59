"""Where the seconds of a run went (paper 002, eq. 7, in more parts): from stamps alone, without clocks.

A run is one line of time, from the first step's begin to the last one's end. What rank 0 did covers it where
ranks were at work; behind a fault, what happened is read off all ranks and the launcher. What nothing covers
is *unaccounted*.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from understudy.campaigns.results.records import PARTS, RESTART, Attempt, Recovery, Span
from understudy.campaigns.results.stamps import Stamp

STARTING = {"imports": "restart", "joined": "communicators", "group": "communicators", "model": "restart",
            "chosen": "restart", "loaded": "copy"}  # fmt: skip
"""What a script does until its first step, as parts. `joined`: of nvidia-resiliency-ext, its own meeting."""


WAITS = ("quorum", "uncommitted")
"""Of torchft, whose ranks that are left do not start again: they wait, or try a step that does not count."""
BRIEF_S = 1e-3
"""What a keeper does in less is part of the step: it had nothing to keep."""


@dataclass(frozen=True)
class Course:
    """A run's seconds; `timeline` from its beginning. `step_seconds`: the median."""

    starting: float
    ending: float
    parts: Mapping[str, float]
    unaccounted: float
    timeline: Sequence[Span]
    recoveries: Sequence[Recovery]
    step_seconds: float
    redone: int
    steps: int


@dataclass
class _Sum:
    """Parts as they come, and what they cover."""

    began: float
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    spans: list[Span] = field(default_factory=list)

    def add(self, part: str, since: float, until: float) -> float:
        if until <= since:
            return 0.0
        self.parts[part] += until - since
        last = self.spans[-1] if self.spans else None
        if last is not None and last.what == part and since - self.began - last.until < 1e-3:
            self.spans[-1] = last.model_copy(update={"until": until - self.began})
        else:
            self.spans.append(Span(what=part, since=since - self.began, until=until - self.began))
        return until - since


def of_restarts(
    stamps: Sequence[Stamp],
    said: Sequence[Stamp],
    attempts: Sequence[Attempt],
    began: float,
    wall: float,
    checkpoints: Mapping[str, float],
) -> Course:
    """Of ranks that are started again. `checkpoints`: rank 0's seconds of snapshot and write, in all.

    Raises ValueError where no step was completed.
    """
    mine = [one for one in stamps if one.rank == 0]
    steps = [one for one in mine if one.what == "step"]
    if not steps:
        raise ValueError("no step was completed")
    total = _Sum(began)
    done, redone, recoveries = 0, 0, []
    at = steps[0].since
    last: Stamp | None = None
    for one in (one for one in mine if one.what in ("step", "kept", *WAITS)):
        if last is not None and one.attempt != last.attempt:
            recovery = _between(stamps, said, attempts, began, last, one, total)
            recoveries.append(recovery)
            at = one.since
        if one.what in WAITS:
            begun = one.since if one.what == "quorum" else at
            total.add("compute", at, begun)
            total.add("detect", begun, one.at)
        elif one.what == "step":
            again = one.step <= done
            redone += again
            total.add("redone" if again else "compute", at, one.at)
            done = max(done, one.step)
        else:
            brief = one.at - one.since < BRIEF_S
            total.add("compute" if brief else "sync", at if brief else one.since, one.at)
        at, last = one.at, one
    for part in ("snapshot", "write"):
        took = min(checkpoints.get(part, 0.0), total.parts["sync"])
        total.parts[part] += took
        total.parts["sync"] -= took
    return _course(total, steps, at, wall, recoveries, redone, done)


def _between(
    stamps: Sequence[Stamp],
    said: Sequence[Stamp],
    attempts: Sequence[Attempt],
    began: float,
    last: Stamp,
    first: Stamp,
    total: _Sum,
) -> Recovery:
    """From the last thing that rank 0 completed to the first step behind the restart."""
    until = first.since
    faults = [one for one in stamps if one.what == "fault" and last.at - 1e-3 <= one.at <= until]
    struck = min(faults, key=lambda one: one.at, default=None)
    at = max(last.at, struck.at) if struck is not None else last.at
    total.add("redone", last.at, at)
    within = [one for one in said if at <= one.at <= until]
    saves = [one for one in within if one.what == "saved"]
    # An attempt's end where the supervisor starts anew; else what torchrun says when it has ended all.
    ends = [began + one.ended for one in attempts if at <= began + one.ended <= until]
    ends += [one.at for one in within if one.what == "launcher has ended all"]
    mine = {one.what: one for one in stamps if one.rank == 0 and one.attempt == first.attempt}
    started = mine["began"].at if "began" in mine else until
    ended = max((one for one in ends if one <= started), default=at)
    before = dict(total.parts)
    if saves:
        since = max(at, min(one.since for one in saves))
        total.add("detect", at, since)
        saved = min(ended, max(one.at for one in saves))
        total.add("write", since, saved)
        total.add("detect", max(since, saved), ended)
    else:
        total.add("detect", at, ended)
    total.add("restart", ended, started)
    now = started
    for name, part in STARTING.items():
        if name in mine:
            end = min(mine[name].at, until)  # torchft waits for its peers inside of a part
            total.add(part, max(now, mine[name].since), end)
            now = max(now, end)
    parts = {name: total.parts[name] - before[name] for name in PARTS if total.parts[name] > before[name]}
    return Recovery(
        fault=struck.note if struck is not None else "unknown",
        rank=struck.rank if struck is not None else -1,
        plan=RESTART,
        total=until - at,
        parts=parts,
    )


def of_proxy(
    stamps: Sequence[Stamp], report: Mapping[str, Any], began: float, wall: float, since_epoch: float = 0.0
) -> Course:
    """Of a run that nobody starts again: what `proxyrun --report` says of its recoveries, taken out of the
    steps that they came in. What such a step took longer beyond that is unaccounted. `since_epoch`: seconds
    of the clock of the report at the beginning of that of the stamps.

    Raises ValueError where no step was completed.
    """
    steps = [one for one in stamps if one.rank == 0 and one.what == "step"]
    if not steps:
        raise ValueError("no step was completed")
    recoveries = [of_report(one) for one in report.get("recoveries", ()) if not one.get("planned")]
    rounds = _rounds(report.get("recoveries", ()))
    total = _Sum(began)
    typical = statistics.median(one.at - one.since for one in steps)
    least = min((one.total for one in rounds), default=0.0)
    at = steps[0].since
    for one in steps:
        took = one.at - at
        total.add("compute", at, at + (typical if rounds and took > typical + least / 2 else took))
        at = one.at
    for recovery in rounds:
        for name, seconds in recovery.parts.items():
            total.parts[name] += seconds
    for recovery in report.get("recoveries", ()):
        ended = recovery.get("at_ms", 0) / 1000 - since_epoch - began
        total.spans.append(Span(what=recovery["plan"], since=ended - recovery["total_s"], until=ended))
    return _course(total, steps, at, wall, recoveries, 0, max(one.step for one in steps))


def of_report(entry: Mapping[str, Any]) -> Recovery:
    """One recovery, as proxyrun's report has it."""
    names = {"detect": "detect_s", "restart": "restart_s", "copy": "copy_s",
             "communicators": "communicators_s", "replay": "replay_s"}  # fmt: skip
    return Recovery(
        fault=str(entry["fault"]),
        rank=int(entry["rank"]),
        plan=str(entry["plan"]),
        total=float(entry["total_s"]),
        parts={part: float(entry[name]) for part, name in names.items()},
    )


def _rounds(entries: Iterable[Mapping[str, Any]]) -> list[Recovery]:
    """Of ranks that were recovered together, the one that took longest: the others waited for it."""
    longest: dict[Any, Recovery] = {}
    for entry in entries:
        if not entry.get("planned"):
            one = of_report(entry)
            known = longest.get(entry.get("generation"))
            if known is None or known.total < one.total:
                longest[entry.get("generation")] = one
    return list(longest.values())


def of_command(report: Mapping[str, Any], wall: float, steps: int) -> Course:
    """Of a user's own command, of which nobody knows what it does when: all that is no recovery computes."""
    recoveries = [of_report(one) for one in report.get("recoveries", ()) if not one.get("planned")]
    parts = dict.fromkeys(PARTS, 0.0)
    for recovery in _rounds(report.get("recoveries", ())):
        for name, seconds in recovery.parts.items():
            parts[name] += seconds
    parts["compute"] = max(0.0, wall - sum(parts.values()))
    return Course(0.0, 0.0, parts, 0.0, (), recoveries, wall / max(1, steps), 0, steps)


def _course(
    total: _Sum,
    steps: Sequence[Stamp],
    end: float,
    wall: float,
    recoveries: Sequence[Recovery],
    redone: int,
    done: int,
) -> Course:
    starting = steps[0].since - total.began
    ending = max(0.0, wall - (end - total.began))
    covered = sum(total.parts.values())
    return Course(
        starting=starting,
        ending=ending,
        parts=total.parts,
        unaccounted=(end - steps[0].since) - covered,
        timeline=total.spans,
        recoveries=recoveries,
        step_seconds=statistics.median(one.at - one.since for one in steps),
        redone=redone,
        steps=done,
    )
