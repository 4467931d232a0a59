"""Whether what was copied to the device in one run is as it should be.  Pure."""

from __future__ import annotations

from understudy.recovery.samples.records import Content
from understudy.recovery.samples.run import Key, Minibatch, RankRecord, Run
from understudy.recovery.samples.verdict import Found, Offence


def judge_contents(run: Run, may_repeat: bool) -> Found:
    """`may_repeat`: the user says that samples come again on purpose."""
    found = Found()
    for key, ranks in run.in_order():
        for rank, record in ranks.items():
            _judge(key, rank, record, may_repeat, found)
            if not record.ended:
                last = max((one.number for one in record.minibatches()), default=0)
                found.note_once(
                    f"attempt {key[0]}: what rank {rank} wrote ends at minibatch {last}; its script did not "
                    "end in order"
                )
            if record.went_back:
                found.note_once(
                    f"rank {rank} was brought back to an image of its process, and did again what followed"
                )
    return found


def _judge(key: Key, rank: int, record: RankRecord, may_repeat: bool, found: Found) -> None:
    expected = 1
    before: Minibatch | None = None
    in_epoch: dict[tuple[int, int, str, int], int] = {}
    for minibatch in record.minibatches():
        if minibatch.content is None:
            continue
        if minibatch.number != expected:
            sentence = f"it comes where minibatch {expected} should."
            found.offences.append(Offence(key, minibatch.number, rank, sentence))
        expected = minibatch.number + 1
        if not may_repeat and (sentence := _repeats(minibatch, before, in_epoch)):
            found.offences.append(Offence(key, minibatch.number, rank, sentence))
        before = minibatch


def _repeats(
    minibatch: Minibatch, before: Minibatch | None, in_epoch: dict[tuple[int, int, str, int], int]
) -> str:
    """How the same samples were copied once more, where no index says so; empty: they were not.

    An epoch's later minibatches may not have the content of an earlier one, if only content tells what they
    had.  Indices tell more: two samples may be equal.
    """
    content = minibatch.content
    if content is None or not content.bytes:
        return ""
    if not minibatch.batches:
        repeated = before is not None and bool(before.batches) and _equal(before.content, content)
        return (
            f"it copies what minibatch {minibatch.number - 1} did once more, with no batch handed out in "
            "between."
            if repeated and minibatch.stepped
            else ""
        )
    last = minibatch.batches[-1]  # the one that was trained on: an evaluation comes behind a step
    if last.ids is not None:
        return ""
    known = (last.loader, last.epoch, content.digest, content.bytes)
    if known in in_epoch:
        return f"it copies what minibatch {in_epoch[known]} of the same epoch did."
    in_epoch[known] = minibatch.number
    return ""


def _equal(one: Content | None, other: Content) -> bool:
    return one is not None and (one.digest, one.bytes, one.payloads) == (
        other.digest,
        other.bytes,
        other.payloads,
    )
