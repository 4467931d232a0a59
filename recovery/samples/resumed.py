"""Loaders with a ResumableSampler: it says which step each batch is of, so attempts continue one another.

They are judged as `python -m understudy.data check` judges a SampleLog, by the sampler's own plan or by
another run.  PyTorch draws the orders of a plan, so it is imported where there is such a loader.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from understudy.recovery.samples.records import Batch, Loader
from understudy.recovery.samples.run import Key, RankRecord, Run
from understudy.recovery.samples.verdict import Found, Offence

if TYPE_CHECKING:
    from understudy.data.accounting import Run as PlannedRun

Plan = tuple[tuple[int, int, int, bool], int]
"""What a ResumableSampler was made with, and how many with that came before."""


def judge_resumed(run: Run, against: Run | None = None) -> Found:
    """Judges a run alone, or beside another."""
    found = Found()
    plans = plans_of(run)
    others = plans_of(against) if against is not None else {}
    last = run.in_order()[-1][0]
    for plan in sorted(others.keys() - plans.keys()):
        found.offences.append(
            Offence(last, 0, 0, f"the other run has a loader {_shown(plan)}, and this one none.")
        )
    if not plans:
        return found
    from understudy.data.judgement import judge

    for plan in plans:
        if against is not None and plan not in others:
            found.offences.append(
                Offence(last, 0, 0, f"it has a loader {_shown(plan)}, and the other run none.")
            )
            continue
        try:
            reference = None if against is None else _as_planned(against, plan)
            verdict = judge(_as_planned(run, plan), reference)
        except ValueError as problem:
            found.note_once(f"the loader {_shown(plan)} is not judged by its plan: {problem}")
            continue
        for one in verdict.offences:
            minibatch, number, key = _place(run, plan, one.rank, one.epoch, one.step)
            found.offences.append(
                Offence(key, minibatch, one.rank, one.sentence, (number, one.epoch, one.step))
            )
    return found


def plans_of(run: Run) -> dict[Plan, None]:
    """In the order in which they first came."""
    found: dict[Plan, None] = {}
    for _, ranks in run.in_order():
        for record in ranks.values():
            found |= dict.fromkeys(resumable(record).values())
    return found


def resumable(record: RankRecord) -> Mapping[int, Plan]:
    """Loaders with such a sampler, by their number."""
    count: dict[tuple[int, int, int, bool], int] = defaultdict(int)
    found: dict[int, Plan] = {}
    for number, loader in sorted(record.loaders.items()):
        if loader.plan is not None:
            found[number] = (loader.plan, count[loader.plan])
            count[loader.plan] += 1
    return found


def _as_planned(run: Run, plan: Plan) -> PlannedRun:
    """As if each rank had kept a SampleLog.  Raises ValueError where it makes no sense."""
    from understudy.data.accounting import Run as PlannedRun
    from understudy.data.plan import EpochPlan
    from understudy.data.records import Beginning, Used, multiset_hash

    planned = PlannedRun()
    for attempt, (_, ranks) in enumerate(run.in_order(), 1):
        used = {rank: list(_used(record, plan)) for rank, record in ranks.items()}
        if not all(record.ended for record in ranks.values()) and all(used.values()):
            last = min(max((one.epoch, one.step) for one in batches) for batches in used.values())
            used = {
                rank: [one for one in batches if (one.epoch, one.step) <= last]
                for rank, batches in used.items()
            }
        for rank, batches in used.items():
            if not batches:
                continue
            world = ranks[rank].beginning.world
            planned.begin(Beginning(attempt, rank, world, EpochPlan(*plan[0]), own_ids=False))
            for one in batches:
                ids = one.ids or ()
                planned.add(attempt, rank, Used(one.epoch, one.step, len(ids), multiset_hash(ids), ids))
    return planned


def _used(record: RankRecord, plan: Plan) -> list[Batch]:
    numbers = {number for number, one in resumable(record).items() if one == plan}
    return [batch for _, batch in record.batches() if batch.loader in numbers]


def _place(run: Run, plan: Plan, rank: int, epoch: int, step: int) -> tuple[int, int, Key]:
    """Minibatch, loader and attempt of a step, in the latest that has it; 0 where none has."""
    attempts = run.in_order()
    for key, ranks in reversed(attempts):
        record = ranks.get(rank)
        numbers = [] if record is None else [n for n, one in resumable(record).items() if one == plan]
        for minibatch, batch in () if record is None else record.batches():
            if batch.loader in numbers and (batch.epoch, batch.step) == (epoch, step):
                return minibatch, batch.loader, key
    return 0, 0, attempts[-1][0]


def is_resumable(loader: Loader | None) -> bool:
    """Whether its batches are judged here."""
    return loader is not None and loader.plan is not None


def _shown(plan: Plan) -> str:
    size, batch, seed, _ = plan[0]
    return f"with a ResumableSampler of {size} samples, {batch} a step, seed {seed}"
