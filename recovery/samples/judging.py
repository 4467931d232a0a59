"""Both levels of one run, alone or beside another.  Pure."""

from __future__ import annotations

from understudy.recovery.samples.comparing import compare
from understudy.recovery.samples.contents import judge_contents
from understudy.recovery.samples.indices import judge_indices
from understudy.recovery.samples.records import Loader
from understudy.recovery.samples.resumed import judge_resumed
from understudy.recovery.samples.run import Run
from understudy.recovery.samples.verdict import Found, Offence, Verdict

MOST_NOTES = 12


def judge(run: Run, against: Run | None = None, *, may_repeat: bool = False) -> Verdict:
    """`may_repeat`: samples come again on purpose, so that this is counted as nothing."""
    looks = [judge_indices(run, may_repeat), judge_contents(run, may_repeat), judge_resumed(run)]
    if against is not None:
        looks += [compare(run, against), judge_resumed(run, against)]
    return _verdict(run, looks)


def _verdict(run: Run, looks: list[Found]) -> Verdict:
    records = [record for _, ranks in run.in_order() for record in ranks.values()]
    batches = [batch for record in records for _, batch in record.batches()]
    minibatches = [one for record in records for one in record.minibatches() if one.content is not None]
    loaders: dict[int, Loader] = {}
    for record in records:
        loaders |= {number: one for number, one in record.loaders.items() if number not in loaders}
    contents = [one.content for one in minibatches if one.content is not None]
    notes = list(dict.fromkeys(note for look in looks for note in look.notes))
    if len(notes) > MOST_NOTES:
        notes = [*notes[:MOST_NOTES], f"and {len(notes) - MOST_NOTES} notes more"]
    return Verdict(
        attempts=len(run.attempts),
        ranks=len(run.last),
        batches=len(batches),
        samples=sum(len(batch.ids) for batch in batches if batch.ids is not None),
        minibatches=sum(one.stepped for one in minibatches),
        payloads=sum(one.payloads for one in contents),
        bytes=sum(one.bytes for one in contents),
        loaders=[str(one) for _, one in sorted(loaders.items())],
        repeated=sum(look.repeated for look in looks),
        offences=sorted({offence for look in looks for offence in look.offences}, key=_order),
        notes=notes,
    )


def _order(offence: Offence) -> tuple[object, ...]:
    """By where it is; an index tells more than content, so it comes first."""
    place = offence.place or ()
    return (offence.attempt, offence.minibatch, offence.rank, not place, place, offence.sentence)
