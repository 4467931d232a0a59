"""A run, as its ranks have written it down: attempts, and in each what every rank had, in order.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from understudy.recovery.samples.records import Batch, Beginning, Content, Loader, Record

Key = tuple[int, int, int]
"""Of an attempt: number of proxyrun's start, the launcher's restart, and which process of that."""


@dataclass(frozen=True)
class Minibatch:
    """The batches handed out since the optimizer's last step, and what was copied until this one."""

    number: int
    batches: Sequence[Batch]
    content: Content | None
    """None: the process ended before the step was done."""

    @property
    def stepped(self) -> bool:
        """Whether an optimizer's step ended it."""
        return self.content is not None and not self.content.end


@dataclass
class RankRecord:
    """What one process has written."""

    beginning: Beginning
    records: list[tuple[int, Record]] = field(default_factory=list)
    """With the numbers of their lines."""
    went_back: int = 0
    """How often the process was brought back to an image of itself."""
    lacking: list[range] = field(default_factory=list)
    """Lines that are missing."""
    loaders: dict[int, Loader] = field(default_factory=dict)

    def add(self, line: int, record: Loader | Batch | Content) -> None:
        """The next line; one with a number that was there before takes the place of all behind that."""
        if line <= self._last:
            self.went_back += 1
            while self.records and self.records[-1][0] >= line:
                self.records.pop()
        elif line > self._last + 1:
            self.lacking.append(range(self._last + 1, line))
        self.records.append((line, record))
        if isinstance(record, Loader):
            self.loaders[record.number] = record

    @property
    def _last(self) -> int:
        return self.records[-1][0] if self.records else 0

    @property
    def ended(self) -> bool:
        """Whether its script came to its end."""
        last = self.records[-1][1] if self.records else None
        return isinstance(last, Content) and last.end

    def batches(self) -> Iterator[tuple[int, Batch]]:
        """Each with the minibatch that it is of."""
        for minibatch in self.minibatches():
            for batch in minibatch.batches:
                yield minibatch.number, batch

    def minibatches(self) -> Iterator[Minibatch]:
        """In their order."""
        number, batches = 1, list[Batch]()
        for _, record in self.records:
            if isinstance(record, Batch):
                batches.append(record)
            elif isinstance(record, Content):
                yield Minibatch(record.minibatch, batches, record)
                number, batches = record.minibatch + 1, []
        if batches:
            yield Minibatch(number, batches, None)


@dataclass
class Run:
    """All attempts of a job on one directory."""

    attempts: dict[Key, dict[int, RankRecord]] = field(default_factory=dict)
    """By key, in their order, and rank."""
    torn: int = 0
    """Lines that a kill has cut short."""

    def begin(self, beginning: Beginning) -> RankRecord:
        """Raises ValueError where it cannot be of this run."""
        occurrence = 0
        while beginning.rank in self.attempts.get(
            key := (beginning.attempt, beginning.restart, occurrence), {}
        ):
            occurrence += 1
        others = self.attempts.setdefault(key, {})
        for other in others.values():
            if other.beginning.world != beginning.world:
                raise ValueError(
                    f"rank {beginning.rank} is one of {beginning.world} in attempt {beginning.attempt}, and "
                    f"rank {other.beginning.rank} one of {other.beginning.world}"
                )
        others[beginning.rank] = RankRecord(beginning)
        return others[beginning.rank]

    def in_order(self) -> list[tuple[Key, dict[int, RankRecord]]]:
        """Oldest first, each with its ranks in order."""
        return [(key, dict(sorted(ranks.items()))) for key, ranks in sorted(self.attempts.items())]

    @property
    def last(self) -> dict[int, RankRecord]:
        """The attempt that counts where nothing tells how attempts continue one another."""
        return self.in_order()[-1][1]
