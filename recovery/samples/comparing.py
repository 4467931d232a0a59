"""Whether two runs have had the same samples, step by step.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest

from understudy.recovery.samples.records import Batch, SampleId
from understudy.recovery.samples.resumed import Plan, is_resumable, resumable
from understudy.recovery.samples.run import Key, Minibatch, RankRecord, Run
from understudy.recovery.samples.verdict import Found, Offence

BEGINNING = 2
"""Minibatches of a process."""

Step = tuple[Plan, int, int]
"""Plan, epoch and step of a ResumableSampler."""


def compare(run: Run, other: Run) -> Found:
    """Indices of loaders that restart with their script, and contents; those that resume are `resumed`'s."""
    found = Found()
    key, mine = run.in_order()[-1]
    theirs = other.last
    if len(run.attempts) > 1 or len(other.attempts) > 1:
        found.note_once("of several attempts the last counts, but for loaders with a ResumableSampler")
    if len(mine) == len(theirs):
        for rank, record in mine.items():
            if rank not in theirs:
                found.offences.append(Offence(key, 0, rank, "the other run has no such rank."))
            else:
                _compare_batches(key, rank, record, theirs[rank], found)
        _compare_contents(run, other, found)
    else:
        found.note_once(
            f"{len(mine)} ranks are compared with {len(theirs)}: by what all ranks had together, "
            "and contents not at all"
        )
        _compare_together(key, mine, theirs, found)
    return found


def _restarting(record: RankRecord) -> list[tuple[int, Batch]]:
    return [one for one in record.batches() if not is_resumable(record.loaders.get(one[1].loader))]


def _compare_batches(key: Key, rank: int, mine: RankRecord, theirs: RankRecord, found: Found) -> None:
    """The first difference counts: what follows from it is none of its own."""
    last = 0
    for one, two in zip_longest(_restarting(mine), _restarting(theirs)):
        if one is None:
            missing = two[1]
            sentence = f"it had no such batch, and the other run had it in minibatch {two[0]}."
            found.offences.append(Offence(key, last, rank, sentence, missing.place))
            return
        last, batch = one
        if two is None:
            found.offences.append(Offence(key, last, rank, "the other run had no such batch.", batch.place))
            return
        if sentence := _difference(batch, two[1]):
            found.offences.append(Offence(key, last, rank, sentence, batch.place))
            return


def _difference(mine: Batch, theirs: Batch) -> str:
    if mine.place != theirs.place:
        loader, epoch, step = theirs.place
        return f"the other run had step {step} of epoch {epoch} of loader {loader} here."
    if mine.ids == theirs.ids:
        return ""
    if mine.ids is None or theirs.ids is None:
        return "one of the runs knows its indices, and the other does not."
    for position, (one, two) in enumerate(zip(mine.ids, theirs.ids, strict=False)):
        if one != two:
            return f"its sample {position} is {_shown(one)}, and {_shown(two)} in the other run."
    if len(mine.ids) == len(theirs.ids):
        return ""
    return f"it has {len(mine.ids)} samples, and {len(theirs.ids)} in the other run."


def _compare_together(
    key: Key, mine: dict[int, RankRecord], theirs: dict[int, RankRecord], found: Found
) -> None:
    """The ranks' samples of each step as one heap, of loaders that deal them out."""
    ours, others = _heaps(mine), _heaps(theirs)
    for place in sorted(ours.keys() | others.keys(), key=lambda place: (place[1], place[2], place[0])):
        if place not in ours or place not in others:
            who = "this run" if place not in ours else "the other run"
            found.offences.append(Offence(key, 0, 0, f"{who} had no such step.", place))
            return
        if ours[place] != others[place]:
            one = next(iter((ours[place] - others[place]) or (others[place] - ours[place])))
            found.offences.append(
                Offence(
                    key, 0, 0, f"sample {_shown(one)} is in one of the runs alone, over all ranks.", place
                )
            )
            return


def _heaps(ranks: dict[int, RankRecord]) -> dict[tuple[int, int, int], Counter[SampleId]]:
    heaps: dict[tuple[int, int, int], Counter[SampleId]] = {}
    for record in ranks.values():
        for _, batch in _restarting(record):
            loader = record.loaders.get(batch.loader)
            if batch.ids is not None and loader is not None and (loader.share is not None or len(ranks) == 1):
                heaps.setdefault(batch.place, Counter()).update(batch.ids)
    return heaps


def _compare_contents(run: Run, other: Run, found: Found) -> None:
    plain = len(run.attempts) == len(other.attempts) == 1
    attempts = run.in_order()
    for rank in sorted(attempts[-1][1].keys() & other.last.keys()):
        if plain or not any(resumable(ranks[rank]) for _, ranks in attempts if rank in ranks):
            mine, theirs = _by_number(run.last[rank]), _by_number(other.last[rank])
            _compare_each(attempts[-1][0], rank, mine, theirs, found)
        else:
            _compare_resumed(attempts[-1][0], rank, _by_step(run, rank), _by_step(other, rank), found)


def _by_number(record: RankRecord) -> Sequence[Minibatch]:
    return [one for one in record.minibatches() if one.content is not None]


def _compare_each(
    key: Key, rank: int, mine: Sequence[Minibatch], theirs: Sequence[Minibatch], found: Found
) -> None:
    for one, two in zip_longest(mine, theirs):
        if one is None or two is None or one.stepped != two.stepped:
            steps, others = (sum(each.stepped for each in several) for several in (mine, theirs))
            sentence = f"it has {steps} minibatches, and the other run {others}."
            number = max(1, min(len(mine), len(theirs)))
            if steps != others:
                found.offences.append(Offence(key, number, rank, sentence))
            return
        if sentence := _other_content(one, two):
            found.offences.append(Offence(key, one.number, rank, sentence))
            return


def _other_content(mine: Minibatch, theirs: Minibatch) -> str:
    one, two = mine.content, theirs.content
    if one is None or two is None or one == two:
        return ""
    if (one.payloads, one.bytes) != (two.payloads, two.bytes):
        return (
            f"{one.payloads} copies of {one.bytes} bytes went to the device, and {two.payloads} of "
            f"{two.bytes} in the other run."
        )
    if one.digest != two.digest:
        return f"other bytes went to the device than in the other run ({one.digest}, {two.digest})."
    return ""


def _by_step(run: Run, rank: int) -> dict[Step, tuple[bool, Minibatch]]:
    """By the step that a resumable loader says; of several attempts the later one counts.

    With whether a resumed attempt begins there: such minibatches also have the state that was loaded, and
    what libraries copy in a process's first steps (DDP's order of its buckets, in the second).
    """
    found: dict[Step, tuple[bool, Minibatch]] = {}
    for number, (_, ranks) in enumerate(run.in_order()):
        if (record := ranks.get(rank)) is None:
            continue
        plans = resumable(record)
        for minibatch in record.minibatches():
            of_plan = [batch for batch in minibatch.batches if batch.loader in plans]
            if of_plan and minibatch.stepped:
                last = of_plan[-1]
                begins = minibatch.number <= BEGINNING and number > 0
                found[plans[last.loader], last.epoch, last.step] = (begins, minibatch)
    return found


def _compare_resumed(
    key: Key,
    rank: int,
    mine: dict[Step, tuple[bool, Minibatch]],
    theirs: dict[Step, tuple[bool, Minibatch]],
    found: Found,
) -> None:
    for step in sorted(mine.keys() & theirs.keys()):
        (begins, one), (others_begin, two) = mine[step], theirs[step]
        if begins or others_begin:
            found.note_once(
                f"contents of the first {BEGINNING} minibatches of a resumed attempt are not compared: "
                "they have more than samples"
            )
        elif sentence := _other_content(one, two):
            found.offences.append(Offence(key, one.number, rank, sentence))
            return


def _shown(sample: SampleId) -> str:
    return repr(sample)[:60]
