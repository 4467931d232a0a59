"""Rolling a dead rank forward to the end of an optimizer step that its replica has finished (paper 4.2.2).

The rank begins again at its commit right before the step, with what it held there; but a buffer that a
replica held too, and that its step has changed since, comes with the content of the step's end.  The new
server runs what does not need those, and leaves out the rest (proxy_server/csrc/executor/roll_forward.h).
Both steps must be the same, by their digests: the same calls with the same numbers of the same contents.

Which buffer of the replica is the same as one of this rank, its content tells: where the step begins, and
where the last one ended.  Two that only look alike are told apart by that, or else nothing is rolled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from understudy.recovery.planning.cuts import Cut
from understudy.recovery.planning.facts import BufferFacts, CommitFacts, Manifest, RankFacts
from understudy.recovery.planning.replicas import Content, Copy, needs_replica


@dataclass(frozen=True)
class RollForward:
    """Buffers (handles) of a rank that have not the content of its commit, and those that it had alone.

    `rolled` have that of the step's end; `steady` have both, as it is the same; `lost` have none.
    `own`: what the replica did not hold where the step begins.  `step_digest`: of the replica's step; this
    rank's must be the same one, which its server finds out on the way.
    """

    rolled: tuple[int, ...]
    steady: tuple[int, ...] = ()
    own: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    step_digest: int = 0


@dataclass(frozen=True)
class _Step:
    """One rank's manifests around a step: where the step before ended, where it begins, and where it ends."""

    before: Mapping[int, BufferFacts]
    begin: Mapping[int, BufferFacts]
    end: Mapping[int, BufferFacts]
    now: Mapping[int, BufferFacts]
    digest: int = 0
    """Of what it did."""

    def history(self, handle: int) -> tuple[Content, Content] | None:
        """What the buffer held where the step before ended and where this one begins; None if not known."""
        first, second = _content(self.before.get(handle)), _content(self.begin.get(handle))
        return (first, second) if first is not None and second is not None else None

    def outcome(self, handle: int) -> Content | None:
        """What it held where the step ended, if it still does."""
        ended = _content(self.end.get(handle))
        return ended if ended == _content(self.now.get(handle)) else None


def evidence_commit(commits: Sequence[CommitFacts], begin: CommitFacts) -> CommitFacts | None:
    """The newest commit before `begin` that ended an optimizer step: at a second point replicas agree."""
    older = [commit for commit in commits if commit.number < begin.number]
    ends = [
        commit for former, commit in zip([None, *older], older, strict=False)
        if former is not None and former.step < commit.step
    ]  # fmt: skip
    return ends[-1] if ends else None


def roll_forward(
    rank: RankFacts, commit: CommitFacts, ranks: Sequence[RankFacts], cut: Cut
) -> tuple[tuple[Copy, ...], RollForward] | None:
    """How a dead rank gets from its commit to where the others are in `cut`; None if it cannot."""
    before = evidence_commit(rank.commits, commit)
    if not commit.optimizer or rank.refuses(commit) or before is None:
        return None
    begin = _by_handle(rank, commit)
    former = _by_handle(rank, before)
    if begin is None or former is None:
        return None
    alive = [other for other in ranks if other.alive and not other.suspect]
    offers = {other.rank: other.manifests.get(cut[other.rank].number, ()) for other in alive}
    for partner in alive:
        step = _step_of(partner, commit.step, cut[partner.rank])
        if step is not None:
            found = _through(_Step(former, begin, {}, {}), partner.rank, step, offers)
            if found is not None:
                return found
    return None


def _step_of(rank: RankFacts, steps: int, now: CommitFacts) -> _Step | None:
    """Its manifests around the step that began after so many others, if it has finished that one."""
    begins = [commit for commit in rank.commits if commit.step == steps and commit.optimizer]
    ends = [commit for commit in rank.commits if commit.step == steps + 1]
    before = evidence_commit(rank.commits, begins[-1]) if begins else None
    if before is None or not ends or now.step <= steps or ends[0].step_digest == 0:
        return None
    manifests = [_by_handle(rank, commit) for commit in (before, begins[-1], ends[0], now)]
    match [manifest for manifest in manifests if manifest is not None]:
        case former, begin, end, newest:
            return _Step(former, begin, end, newest, ends[0].step_digest)
    return None


def _through(
    mine: _Step, partner: int, theirs: _Step, offers: Mapping[int, Manifest]
) -> tuple[tuple[Copy, ...], RollForward] | None:
    """Every buffer's content with this partner's help, or None."""
    alike: dict[tuple[Content, Content], list[int]] = {}
    for handle in sorted(theirs.begin):
        if (history := theirs.history(handle)) is not None:
            alike.setdefault(history, []).append(handle)
    anywhere = _places(offers)
    taken: Counter[tuple[Content, Content]] = Counter()
    copies: dict[int, Copy] = {}
    rolled: list[int] = []
    steady: list[int] = []
    lost: list[int] = []
    for handle, buffer in sorted(mine.begin.items()):
        history = mine.history(handle)
        same = alike.get(history, []) if history is not None else []
        outcomes = {theirs.outcome(other) for other in same}
        outcome = outcomes.pop() if len(outcomes) == 1 else None
        if history is not None and outcome is not None and buffer.bytes > 0:
            source = same[taken[history] % len(same)]
            taken[history] += 1
            is_steady = outcome == history[1]
            (steady if is_steady else rolled).append(handle)
            if needs_replica(buffer) or not is_steady:
                copies[handle] = Copy(handle, partner, source, *outcome)
        elif needs_replica(buffer):
            content = _content(buffer)
            if content is not None and content in anywhere:
                holder, source = anywhere[content]
                copies[handle] = Copy(handle, holder, source, *content)
            elif handle not in mine.before:  # made in this minibatch: it may be freed before the step ends
                lost.append(handle)
            else:
                return None
    if not any(needs_replica(mine.begin[handle]) for handle in rolled):  # what is shadowed is computed again
        copies = {handle: copy for handle, copy in copies.items() if handle not in rolled}
        rolled = []
    own = _own(mine.begin, theirs.begin)
    return tuple(copies.values()), RollForward(
        tuple(rolled), tuple(steady), own, tuple(lost), theirs.digest
    )  # fmt: skip


def _own(mine: Mapping[int, BufferFacts], theirs: Mapping[int, BufferFacts]) -> tuple[int, ...]:
    """Buffers whose content the other rank has not, or not as often."""
    here = Counter(_content(buffer) for buffer in mine.values())
    there = Counter(_content(buffer) for buffer in theirs.values())
    return tuple(
        sorted(
            handle for handle, buffer in mine.items()
            if (content := _content(buffer)) is None or here[content] != there[content]
        )
    )  # fmt: skip


def _places(offers: Mapping[int, Manifest]) -> dict[Content, tuple[int, int]]:
    """Content -> (rank, handle) that holds it now."""
    found: dict[Content, tuple[int, int]] = {}
    for rank in sorted(offers):
        for buffer in offers[rank]:
            if (content := _content(buffer)) is not None:
                found.setdefault(content, (rank, buffer.handle))
    return found


def _content(buffer: BufferFacts | None) -> Content | None:
    return (buffer.bytes, buffer.digest) if buffer is not None and buffer.digest is not None else None


def _by_handle(rank: RankFacts, commit: CommitFacts) -> dict[int, BufferFacts] | None:
    """A manifest carries its own digest: who reads it need not ask whether its shadows are still there."""
    manifest = rank.manifests.get(commit.number)
    return {buffer.handle: buffer for buffer in manifest} if manifest is not None else None


def floor_for_roll_forward(commits: Iterable[CommitFacts]) -> int | None:
    """The commit from which on all must be kept, so that a rank can be rolled through its newest step."""
    known = list(commits)
    begins = [commit for commit in known if commit.optimizer]
    before = evidence_commit(known, begins[-1]) if begins else None
    return before.number if before is not None else None
