"""What the time from a fault to the first new step consists of: from stamps alone, without clocks or files.

The first new step is the one that the fault has cut off: none before it is new, and a job that goes on behind
an older checkpoint has to do those again. A part ends when the last rank has come to its end, and begins
where the one before it has ended, if it has not begun later. What lies between parts is in none of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fault_plan import RANKS, Fault

from understudy.campaigns.results.stamps import LAUNCHER, Stamp

PARTS = {
    "noticed": "from the fault until a rank, or the launcher, notices it",
    "saved": "the ranks that are left save, until it is durable",
    "ended": "the launcher notices, and ends what is left",
    "launched": "rendezvous, new processes, until the script's first line",
    "imports": "`import torch` and the rest",
    "group": "`init_process_group`",
    "model": "text, model, `DistributedDataParallel`, optimizer (with which PyTorch imports its compiler)",
    "chosen": "`jit.init`, and which checkpoint it will be",
    "loaded": "read and given back (periodic: chosen, too), first batch",
    "first step": "the first step behind the restart",
    "redone": "what else was complete before the fault, and the step that the fault cut off",
}
OF_THE_SCRIPT = ("imports", "group", "model", "chosen", "loaded")
PAPERS_RESTORE = OF_THE_SCRIPT
"""What Table 4 counts as restoring: from the job's initialisation to the checkpoint's being loaded."""


class Unexpected(ValueError):
    """Something else happened than was planned, so that nothing was measured."""


@dataclass(frozen=True)
class Recovery:
    """Seconds. `redone`: steps that were complete before the fault, and were done once more."""

    kind: str
    rank: int
    behind: int
    total: float
    parts: Mapping[str, float]
    redone: int
    noticed_by: str
    reasons: Sequence[str] = field(default_factory=tuple)
    """Of the saves."""

    @property
    def unaccounted(self) -> float:
        """Seconds of the total that are in no part."""
        return self.total - sum(self.parts.values())

    @property
    def as_in_the_paper(self) -> float:
        """Saving, initialising and restoring: without noticing, and without the launcher (§6.4)."""
        return sum(self.parts.get(name, 0.0) for name in ("saved", *PAPERS_RESTORE))


def recoveries(stamps: Sequence[Stamp], faults: Sequence[Fault]) -> list[Recovery]:
    """Of one job, one for each fault. Raises Unexpected."""
    attempts = {stamp.attempt for stamp in stamps if stamp.rank != LAUNCHER and stamp.attempt >= 0}
    if attempts != set(range(len(faults) + 1)):
        raise Unexpected(f"{len(faults)} faults were planned, and there were the attempts {sorted(attempts)}")
    return [_recovery(stamps, fault, attempt) for attempt, fault in enumerate(faults)]


def losses(stamps: Iterable[Stamp]) -> dict[tuple[int, int], str]:
    """The bits of each rank's loss at each step. Raises Unexpected if a step that was redone has others."""
    found: dict[tuple[int, int], str] = {}
    for stamp in stamps:
        if stamp.what == "step" and found.setdefault((stamp.rank, stamp.step), stamp.note) != stamp.note:
            raise Unexpected(f"rank {stamp.rank} had two losses at step {stamp.step}, which was redone")
    return found


def checkpoint_seconds(stamps: Iterable[Stamp]) -> list[float]:
    """How long each periodic checkpoint kept rank 0."""
    return [one.at - one.since for one in stamps if one.what == "checkpoint" and one.rank == 0]


def step_seconds(stamps: Iterable[Stamp]) -> float:
    """The median step of rank 0. Raises Unexpected if there is none."""
    found = [one.at - one.since for one in stamps if one.what == "step" and one.rank == 0]
    if not found:
        raise Unexpected("no step was completed")
    return statistics.median(found)


def _recovery(stamps: Sequence[Stamp], fault: Fault, attempt: int) -> Recovery:
    cut = _only(stamps, "fault", attempt, [fault.rank])
    if (cut.note, cut.step) != (fault.kind, fault.behind):
        raise Unexpected(f"{fault} was planned, and {cut.note} happened behind step {cut.step}")
    behind = [stamp for stamp in stamps if stamp.attempt in (-1, attempt + 1) and stamp.since >= cut.at]
    began = max(one.at for one in _of_all(behind, "began", attempt + 1))
    said = [one for one in behind if one.attempt == -1 and one.at < began]
    saves = [one for one in said if one.what == "saved"]
    noticed = min(_signs(stamps, said, cut, attempt), key=lambda one: one.since)
    ended = _first(said, "launcher has ended all")
    steps = [one for one in behind if one.what == "step" and one.attempt == attempt + 1]
    first = min((one.step for one in steps), default=0)
    done = [one for one in steps if one.step <= fault.behind + 1]
    last = [one for one in done if one.step == fault.behind + 1]
    if len(last) != RANKS or not 0 < first <= fault.behind + 1:
        raise Unexpected(f"behind {fault} the job went on with step {first}")
    spans = [("noticed", cut.at, noticed.since)]
    if saves:
        spans.append(("saved", min(one.since for one in saves), max(one.at for one in saves)))
    spans.append(("ended", spans[-1][2], ended.at))
    spans.append(("launched", ended.at, began))
    spans += [_span(name, _of_all(behind, name, attempt + 1)) for name in OF_THE_SCRIPT]
    spans.append(_span("first step", [one for one in done if one.step == first]))
    if first <= fault.behind:
        spans.append(_span("redone", [one for one in done if one.step > first]))
    return Recovery(
        kind=fault.kind,
        rank=fault.rank,
        behind=fault.behind,
        total=max(one.at for one in last) - cut.at,
        parts=_one_behind_another(spans),
        redone=fault.behind - (first - 1),
        noticed_by="the launcher" if noticed.rank == LAUNCHER else "another rank",
        reasons=tuple(one.note for one in saves),
    )


def _signs(stamps: Iterable[Stamp], said: Iterable[Stamp], cut: Stamp, attempt: int) -> list[Stamp]:
    """That something is wrong: a rank's exception, the beginning of a save, what the launcher says."""
    found = [one for one in said if one.what in ("saved", "launcher notices")]
    found += [
        one
        for one in stamps
        if one.what == "noticed" and one.attempt == attempt and one.rank != cut.rank and one.at >= cut.at
    ]
    if not found:
        raise Unexpected(f"nobody has noticed the fault behind step {cut.step}")
    return found


def _one_behind_another(spans: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    seconds, at = {}, float("-inf")
    for name, since, until in spans:
        begins = max(since, at)
        at = max(at, until)
        seconds[name] = at - begins if at > begins else 0.0
    return seconds


def _span(name: str, stamps: Sequence[Stamp]) -> tuple[str, float, float]:
    return name, min(one.since for one in stamps), max(one.at for one in stamps)


def _of_all(stamps: Iterable[Stamp], what: str, attempt: int) -> list[Stamp]:
    found = [one for one in stamps if one.what == what and one.attempt == attempt]
    if sorted(one.rank for one in found) != list(range(RANKS)):
        raise Unexpected(f"of {what!r} in attempt {attempt} there are {len(found)}, and not one of each rank")
    return found


def _only(stamps: Iterable[Stamp], what: str, attempt: int, ranks: Sequence[int]) -> Stamp:
    found = [one for one in stamps if one.what == what and one.attempt == attempt]
    if [one.rank for one in found] != list(ranks):
        raise Unexpected(f"of {what!r} in attempt {attempt} there are {len(found)}, and not one")
    return found[0]


def _first(stamps: Iterable[Stamp], what: str) -> Stamp:
    found = sorted((one for one in stamps if one.what == what), key=lambda one: one.at)
    if not found:
        raise Unexpected(f"it was never said: {what}")
    return found[0]
