"""What the logs of a run say was used at each step (paper 002 §4.8). Pure: records in, no files.

Of a step that several attempts have done, the latest counts that all its ranks have recorded: an attempt that
was killed in a step leaves records of some ranks, and a later attempt does that step again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

from .plan import EpochPlan
from .records import Beginning, SampleId, Used, added

Where = tuple[int, int]
"""Epoch and step."""


@dataclass(frozen=True, order=True)
class Offence:
    """Something that is wrong, ordered by where it is in the run."""

    epoch: int
    step: int
    rank: int
    sentence: str

    def __str__(self) -> str:
        return f"epoch {self.epoch}, step {self.step}, rank {self.rank}: {self.sentence}"


@dataclass
class Attempt:
    """What the ranks of one attempt have recorded."""

    world_size: int
    plan: EpochPlan
    own_ids: bool
    used: dict[Where, dict[int, Used]] = field(default_factory=lambda: defaultdict(dict))
    """By epoch and step, then by rank."""


@dataclass(frozen=True)
class Taken:
    """A step as it counts: what each rank has used, on how many ranks."""

    world_size: int
    by_rank: Mapping[int, Used]

    @property
    def whole(self) -> bool:
        return len(self.by_rank) == self.world_size

    @property
    def hash(self) -> int:
        return added(one.hash for one in self.by_rank.values())

    @property
    def ids(self) -> list[SampleId] | None:
        """Of all ranks, in their order; None where the log has only hashes."""
        parts = [used.ids for _, used in sorted(self.by_rank.items())]
        return None if any(part is None for part in parts) else list(chain(*filter(None, parts)))


class Run:
    """What the records of a run say, as they are added, rank by rank, in the order of its files."""

    def __init__(self) -> None:
        self.attempts: dict[int, Attempt] = {}
        self.offences: list[Offence] = []
        self.torn = 0
        """Lines that a kill has cut short: their steps are done again."""

    @property
    def plan(self) -> EpochPlan:
        """That of its first attempt, which all others must have."""
        return self.attempts[min(self.attempts)].plan

    @property
    def own_ids(self) -> bool:
        return self.attempts[min(self.attempts)].own_ids

    @property
    def redone(self) -> int:
        """Steps that more than one attempt has recorded."""
        return sum(len(attempt.used) for attempt in self.attempts.values()) - len(self.steps())

    def begin(self, beginning: Beginning) -> None:
        """Raises ValueError where ranks of one attempt, or attempts of one run, are of different runs."""
        attempt = Attempt(beginning.world_size, beginning.plan, beginning.own_ids)
        known = self.attempts.setdefault(beginning.attempt, attempt)
        if known.world_size != beginning.world_size:
            raise ValueError(
                f"Attempt {beginning.attempt} has {known.world_size} ranks in one file and "
                f"{beginning.world_size} in that of rank {beginning.rank}."
            )
        first = self.attempts[min(self.attempts)]
        if (first.plan, first.own_ids) != (beginning.plan, beginning.own_ids):
            raise ValueError(
                f"Attempt {beginning.attempt} has another data set, global batch, seed or kind of ids than "
                f"attempt {min(self.attempts)}: they are different runs, which need a directory each."
            )

    def add(self, attempt: int, rank: int, used: Used) -> None:
        by_rank = self.attempts[attempt].used[used.epoch, used.step]
        if rank in by_rank:
            self.offences.append(
                Offence(used.epoch, used.step, rank, f"it is recorded twice in attempt {attempt}.")
            )
        by_rank[rank] = used

    def steps(self) -> dict[Where, Taken]:
        """Each step as it counts, in the order of the run."""
        found: dict[Where, Taken] = {}
        for _, attempt in sorted(self.attempts.items()):
            for where, by_rank in attempt.used.items():
                taken = Taken(attempt.world_size, by_rank)
                if taken.whole or where not in found or not found[where].whole:
                    found[where] = taken
        return dict(sorted(found.items()))

    def leaps(self) -> list[Offence]:
        """Steps that a rank has left out between two that it has recorded in the same attempt.

        An earlier attempt's record of such a step would hide that.
        """
        found = []
        for number, attempt in self.attempts.items():
            before: dict[int, Where] = {}
            for where, by_rank in sorted(attempt.used.items()):
                for rank in by_rank:
                    expected = following(before.get(rank, where), attempt.plan.steps)
                    if rank in before and where != expected:
                        sentence = (
                            f"attempt {number} leaps over this step to epoch {where[0]}, step {where[1]}."
                        )
                        found.append(Offence(*expected, rank, sentence))
                    before[rank] = where
        return found


def following(where: Where, steps: int) -> Where:
    """The step behind one, in epochs of so many."""
    epoch, step = where
    return (epoch, step + 1) if step + 1 < steps else (epoch + 1, 0)


def gaps(present: Iterable[int], end: int) -> Sequence[range]:
    """What `present` leaves out of range(end), as ranges: there may be too many to go through one by one."""
    edges = [-1, *sorted(one for one in set(present) if one < end), end]
    return [range(before + 1, after) for before, after in pairwise(edges) if after - before > 1]
