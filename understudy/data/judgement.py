"""Whether a run has used exactly the samples that it should have (paper 002 §3.4, §4.8). Pure: no files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .accounting import Offence, Run, Taken, Where, gaps
from .plan import EpochPlan
from .records import SampleId, multiset_hash

MOST_SAMPLES = 10**9
"""Of a data set whose order is drawn to compare with: it takes 8 bytes for each."""


@dataclass(frozen=True)
class EpochCount:
    """Eq. 2 for one epoch, in samples. None: hashes alone do not tell how many."""

    epoch: int
    steps: int
    duplicates: int | None
    missing: int | None
    extra: int | None


@dataclass(frozen=True)
class Verdict:
    """What is said of a run. Without offences, duplicates = missing = extra = 0 in each epoch."""

    epochs: Sequence[EpochCount]
    offences: Sequence[Offence]
    compared: bool
    """Whether it was known which samples belong where; else only duplicates and numbers were judged."""

    @property
    def exact(self) -> bool:
        return not self.offences


class Expected(Protocol):
    """E of eq. 5: what should have been used."""

    def epochs_lacking(self, present: Iterable[int]) -> Sequence[range]: ...

    def steps_lacking(self, epoch: int, present: Iterable[int]) -> Sequence[range]: ...

    def has(self, where: Where) -> bool: ...

    def ids(self, where: Where) -> Sequence[SampleId] | None: ...

    def hash(self, where: Where) -> int | None: ...


class ByPlan:
    """What the sampler's plan says, up to the last step of the run: it may have been stopped anywhere."""

    def __init__(self, plan: EpochPlan, last: Where) -> None:
        if plan.dataset_size > MOST_SAMPLES:
            raise ValueError(
                f"The log says that its data set has {plan.dataset_size} samples; orders of more than "
                f"{MOST_SAMPLES} are not drawn again. Compare it with a run that never stopped (--against)."
            )
        self.plan, self.last = plan, last
        self._drawn: tuple[int, torch.Tensor] | None = None

    def epochs_lacking(self, present: Iterable[int]) -> Sequence[range]:
        return gaps(present, self.last[0] + 1)

    def steps_lacking(self, epoch: int, present: Iterable[int]) -> Sequence[range]:
        ended = epoch < self.last[0]
        return gaps(present, self.plan.steps if ended else min(self.plan.steps, self.last[1] + 1))

    def has(self, where: Where) -> bool:
        return where[1] < self.plan.steps

    def ids(self, where: Where) -> Sequence[SampleId] | None:
        if self._drawn is None or self._drawn[0] != where[0]:
            self._drawn = (where[0], self.plan.order(where[0]))
        return self.plan.window(self._drawn[1], where[1]).tolist()

    def hash(self, where: Where) -> int | None:
        return multiset_hash(self.ids(where) or ())


class ByNumbersAlone(ByPlan):
    """The ids are the data set's own, and nothing says where they belong: only their number is known."""

    def __init__(self, plan: EpochPlan, last: Where) -> None:
        self.plan, self.last = plan, last

    def ids(self, where: Where) -> Sequence[SampleId] | None:
        return None

    def hash(self, where: Where) -> int | None:
        return None


class ByRun:
    """What another run has used."""

    def __init__(self, run: Run) -> None:
        self.taken = run.steps()
        self._by_epoch: dict[int, list[int]] = {}
        for epoch, step in self.taken:
            self._by_epoch.setdefault(epoch, []).append(step)

    def epochs_lacking(self, present: Iterable[int]) -> Sequence[range]:
        return [range(epoch, epoch + 1) for epoch in sorted(self._by_epoch.keys() - set(present))]

    def steps_lacking(self, epoch: int, present: Iterable[int]) -> Sequence[range]:
        wanted = self._by_epoch.get(epoch, [])
        return [range(step, step + 1) for step in sorted(set(wanted) - set(present))]

    def has(self, where: Where) -> bool:
        return where in self.taken

    def ids(self, where: Where) -> Sequence[SampleId] | None:
        return self.taken[where].ids

    def hash(self, where: Where) -> int | None:
        return self.taken[where].hash


def judge(run: Run, against: Run | None = None) -> Verdict:
    """Raises ValueError where there is nothing to judge, or nothing to judge it by."""
    taken = run.steps()
    if not taken:
        raise ValueError("The log has no step in it; the run has not recorded any.")
    expected = _expected(run, against, taken)
    by_epoch: dict[int, dict[int, Taken]] = {}
    for (epoch, step), one in taken.items():
        by_epoch.setdefault(epoch, {})[step] = one
    offences = [*run.offences, *run.leaps()]
    for lacking in expected.epochs_lacking(by_epoch):
        offences.append(Offence(lacking.start, 0, 0, f"nobody has recorded {_several('epoch', lacking)}."))
    counts = []
    for epoch, steps in by_epoch.items():
        found = _Epoch(epoch, steps, expected, run.plan)
        offences += found.offences()
        counts.append(found.count())
    return Verdict(counts, sorted(offences), not isinstance(expected, ByNumbersAlone))


def _expected(run: Run, against: Run | None, taken: Mapping[Where, Taken]) -> Expected:
    if against is not None:
        if against.own_ids != run.own_ids:
            raise ValueError(
                "One run has recorded indices and the other ids of the data set; they cannot be compared."
            )
        if not (reference := ByRun(against)).taken:
            raise ValueError("The run to compare with has no step in its log.")
        return reference
    if not run.own_ids:
        return ByPlan(run.plan, max(taken))
    if any(one.ids is None for one in taken.values()):
        raise ValueError(
            "The log has hashes of the data set's own ids, which nothing here can be compared with; name a "
            "run that never stopped (--against)."
        )
    return ByNumbersAlone(run.plan, max(taken))


class _Epoch:
    """One epoch of a run beside what was expected of it."""

    def __init__(self, epoch: int, steps: Mapping[int, Taken], expected: Expected, plan: EpochPlan) -> None:
        self.epoch, self.steps, self.expected, self.plan = epoch, steps, expected, plan
        self.lacking = expected.steps_lacking(epoch, steps)
        self.wrong: list[int] = []

    def offences(self) -> list[Offence]:
        found = [
            Offence(self.epoch, lacking.start, 0, f"nobody has recorded {_several('step', lacking)}.")
            for lacking in self.lacking
        ]
        seen: dict[SampleId, int] = {}
        for step, taken in self.steps.items():
            offence = self._step(step, taken)
            if offence is None and isinstance(self.expected, ByNumbersAlone):
                offence = self._repeated(step, taken, seen)
            if offence is not None:
                self.wrong.append(step)
                found.append(offence)
        return found

    def _step(self, step: int, taken: Taken) -> Offence | None:
        where = (self.epoch, step)
        if not self.expected.has(where):
            return Offence(*where, 0, "the run should have no such step.")
        if not taken.whole:
            missing = min(set(range(len(taken.by_rank) + 1)) - taken.by_rank.keys())
            return Offence(*where, missing, f"it has recorded nothing; {taken.world_size} ranks took part.")
        wanted = self.expected.hash(where)
        if wanted is not None and taken.hash != wanted:
            return self._difference(where, taken)
        each = self.plan.global_batch // taken.world_size
        for rank, used in sorted(taken.by_rank.items()):
            if wanted is None and used.count != each:
                return Offence(*where, rank, f"it has used {used.count} samples instead of {each}.")
        return None

    def _difference(self, where: Where, taken: Taken) -> Offence:
        """The first id that does not belong there, and the first that is missing."""
        used, wanted = taken.ids, self.expected.ids(where)
        if used is None or wanted is None:
            return Offence(*where, 0, "the hash of the samples is another; the log has no ids to say which.")
        lacking = list((Counter(wanted) - Counter(used)).elements())
        remaining = Counter(wanted)
        for rank, one in sorted(taken.by_rank.items()):
            for sample in one.ids or ():
                if not remaining[sample]:
                    how = "once too often" if sample in wanted else "which does not belong to this step"
                    instead = f"; {lacking[0]!r} is missing" if lacking else ""
                    return Offence(*where, rank, f"it has used sample {sample!r}, {how}{instead}.")
                remaining[sample] -= 1
        rank = list(wanted).index(lacking[0]) * taken.world_size // len(wanted)
        return Offence(*where, rank, f"sample {lacking[0]!r} is missing.")

    def _repeated(self, step: int, taken: Taken, seen: dict[SampleId, int]) -> Offence | None:
        for rank, used in sorted(taken.by_rank.items()):
            for sample in used.ids or ():
                if sample in seen:
                    return Offence(
                        self.epoch, step, rank, f"sample {sample!r} was used in step {seen[sample]} already."
                    )
                seen[sample] = step
        return None

    def count(self) -> EpochCount:
        """Eq. 2. Where each step is as expected, so is the epoch, and nothing need be counted."""
        if isinstance(self.expected, ByNumbersAlone):
            used = Counter(sample for taken in self.steps.values() for sample in taken.ids or ())
            return EpochCount(self.epoch, len(self.steps), used.total() - len(used), None, None)
        lacking = sum(len(one) for one in self.lacking) * self.plan.global_batch
        if not self.wrong:
            return EpochCount(self.epoch, len(self.steps), 0, lacking, 0)
        wanted: Counter[SampleId] = Counter()
        found: Counter[SampleId] = Counter()
        for step, taken in self.steps.items():
            known = self.expected.has((self.epoch, step))
            ids, expected = taken.ids, self.expected.ids((self.epoch, step)) if known else ()
            if ids is None or expected is None:
                return EpochCount(self.epoch, len(self.steps), None, None, None)
            found.update(ids)
            wanted.update(expected)
        for steps in self.lacking:
            for step in steps:
                wanted.update(self.expected.ids((self.epoch, step)) or ())
        extra = sum(number for sample, number in found.items() if sample not in wanted)
        return EpochCount(
            self.epoch, len(self.steps), (found - wanted).total() - extra, (wanted - found).total(), extra
        )


def _several(name: str, numbers: range) -> str:
    if len(numbers) == 1:
        return f"this {name}" if name == "step" else f"{name} {numbers.start}"
    return f"{name}s {numbers.start} to {numbers.stop - 1}"
