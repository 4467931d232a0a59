"""Whether the indices of one run are as its samplers promise: each sample once, each one rank's.  Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from understudy.recovery.samples.records import Batch, Loader, SampleId
from understudy.recovery.samples.run import Key, RankRecord, Run
from understudy.recovery.samples.verdict import Found, Offence

Handed = tuple[int, Batch]
"""Minibatch and batch."""


def judge_indices(run: Run, may_repeat: bool) -> Found:
    """`may_repeat`: the user says that samples come again on purpose."""
    found = Found()
    for key, ranks in run.in_order():
        for rank, record in ranks.items():
            _Rank(key, rank, record, found).judge(may_repeat)
        _judge_shares(key, ranks, found)
    return found


def by_iteration(record: RankRecord) -> Mapping[tuple[int, int], Sequence[Handed]]:
    """What a rank was handed, by loader and epoch."""
    found: dict[tuple[int, int], list[Handed]] = defaultdict(list)
    for minibatch, batch in record.batches():
        found[batch.loader, batch.epoch].append((minibatch, batch))
    return found


class _Rank:
    """One process of a run."""

    def __init__(self, key: Key, rank: int, record: RankRecord, found: Found) -> None:
        self.key, self.rank, self.record, self.found = key, rank, record, found

    def judge(self, may_repeat: bool) -> None:
        for lines in self.record.lacking:
            span = f"line {lines.start}" if len(lines) == 1 else f"lines {lines.start} to {lines.stop - 1}"
            self._offend(0, None, f"{span} of what it wrote {'is' if len(lines) == 1 else 'are'} missing.")
        if self.record.beginning.left_out:
            self.found.note_once(
                f"rank {self.rank} was handed {self.record.beginning.left_out} batches before it used its "
                "device, which are not written down"
            )
        for (number, _), handed in by_iteration(self.record).items():
            loader = self.record.loaders.get(number)
            if loader is None:
                self._offend(handed[0][0], handed[0][1], "nothing says what loader this is.")
                continue
            self._judge_steps(handed, loader)
            if any(batch.ids is None for _, batch in handed):
                self.found.note_once(f"{loader}: its batches are known by their content alone")
            if not (may_repeat or loader.may_repeat or loader.plan):
                self._judge_repeats(handed, loader)

    def _judge_steps(self, handed: Sequence[Handed], loader: Loader) -> None:
        before = None if loader.plan or self.record.beginning.left_out else -1
        for minibatch, batch in handed:
            if before is not None and batch.step != before + 1:
                self._offend(minibatch, batch, f"it comes behind step {before}." if before >= 0 else
                             "it is the first of its epoch.")  # fmt: skip
                return
            before = batch.step

    def _judge_repeats(self, handed: Sequence[Handed], loader: Loader) -> None:
        seen: dict[SampleId, int] = {}
        for minibatch, batch, sample, is_padding in samples_of(handed, loader):
            if sample not in seen:
                seen[sample] = batch.step
            elif not is_padding:
                if not self.found.repeated or not self._is_told(batch):
                    again = "in this very step" if seen[sample] == batch.step else f"in step {seen[sample]}"
                    self._offend(minibatch, batch, f"sample {_shown(sample)} was used {again} already.")
                self.found.repeated += 1

    def _is_told(self, batch: Batch) -> bool:
        """Whether a repetition in this epoch has been told already."""
        last = self.found.offences[-1]
        return (
            last.attempt == self.key
            and last.rank == self.rank
            and last.place is not None
            and last.place[:2] == batch.place[:2]
        )

    def _offend(self, minibatch: int, batch: Batch | None, sentence: str) -> None:
        place = None if batch is None else batch.place
        self.found.offences.append(Offence(self.key, minibatch, self.rank, sentence, place))


def samples_of(handed: Sequence[Handed], loader: Loader) -> Iterator[tuple[int, Batch, SampleId, bool]]:
    """Each sample of an epoch, and whether it only fills up the ranks' shares to equal lengths."""
    number = 0
    size = loader.dataset_size
    for minibatch, batch in handed:
        for sample in batch.ids or ():
            padding = loader.share is not None and size is not None and loader.share.position(number) >= size
            yield minibatch, batch, sample, padding
            number += 1


def _judge_shares(key: Key, ranks: Mapping[int, RankRecord], found: Found) -> None:
    """What a sampler deals out to ranks, no two of them may have."""
    shared: dict[tuple[object, ...], dict[int, Loader]] = defaultdict(dict)
    for rank, record in ranks.items():
        count: Counter[tuple[object, ...]] = Counter()
        for loader in record.loaders.values():
            if loader.share is None or loader.share.replicas < 2 or loader.plan or loader.may_repeat:
                continue
            kind = (
                loader.kind,
                loader.samplers,
                loader.dataset_size,
                loader.share.replicas,
                loader.share.chunk,
            )
            shared[*kind, count[kind]][rank] = loader
            count[kind] += 1
    parts = {rank: by_iteration(record) for rank, record in ranks.items()}
    for loaders in shared.values():
        numbers = {rank: loader.number for rank, loader in loaders.items()}
        epochs = {epoch for rank, number in numbers.items() for one, epoch in parts[rank] if one == number}
        for epoch in sorted(epochs):
            owner: dict[SampleId, int] = {}
            for rank, loader in loaders.items():
                mine = _of_others(parts[rank].get((loader.number, epoch), ()), loader, owner, rank)
                if mine is not None:
                    minibatch, batch, sample = mine
                    found.offences.append(
                        Offence(
                            key, minibatch, rank,
                            f"sample {_shown(sample)} is rank {owner[sample]}'s, which had it in this epoch.",
                            batch.place,
                        )
                    )  # fmt: skip
                    break


def _of_others(
    handed: Sequence[Handed], loader: Loader, owner: dict[SampleId, int], rank: int
) -> tuple[int, Batch, SampleId] | None:
    """The first sample that another rank had; None: there is none, and all are this rank's from now on."""
    for minibatch, batch, sample, is_padding in samples_of(handed, loader):
        if not is_padding and owner.setdefault(sample, rank) != rank:
            return minibatch, batch, sample
    return None


def _shown(sample: SampleId) -> str:
    return repr(sample)[:60]
