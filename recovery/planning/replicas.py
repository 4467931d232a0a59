"""Which rank has my bytes?  Equal content is found by size and digest (design.md §7)."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from understudy.recovery.planning.facts import BufferFacts, CommitFacts, Manifest, RankFacts
from understudy.replay import content_digest

Content = tuple[int, int]
"""(bytes, digest)"""


@dataclass(frozen=True)
class Copy:
    """One buffer to fetch: `handle` of the restored rank from `source_handle` of rank `source`.

    `others`: handles of `source` with equal content, for what has none left: a buffer that its rank has freed
    since, and would not read again, comes back without content, and may be equal by chance (zeroed ones).
    """

    handle: int
    source: int
    source_handle: int
    bytes: int
    digest: int
    others: tuple[int, ...] = ()


MOST_OTHERS = 8


def needs_replica(buffer: BufferFacts) -> bool:
    """Whether a commit alone cannot rebuild this buffer."""
    return not buffer.shadowed and buffer.bytes > 0


def wanted_of(manifest: Manifest) -> set[Content]:
    """What a rank needs of others that is to hold this."""
    return {(b.bytes, b.digest) for b in manifest if b.digest is not None and needs_replica(b)}


class Holders:
    """The first ranks that hold wanted contents.  Of others than these no manifest is read twice.

    Of the ranks that hold a content, those on the reader's host come first.  Each reader begins with another
    one, so that no rank is read by all: as many as there are readers will do.
    """

    def __init__(
        self,
        ranks: Sequence[RankFacts],
        cut: Mapping[int, CommitFacts],
        readers: Sequence[tuple[str, Manifest]],
        enough: int = 1,
    ) -> None:
        """`ranks`: those of which it can be read what they hold at the cut; `readers`: host and what is to be
        there; `enough`: all readers.
        """
        self._cut = cut
        self._enough = enough
        self._handles: dict[int, dict[Content, list[int]]] = {}
        """Of the ranks that were chosen: the handles of buffers with wanted contents."""
        self._near: dict[str, dict[Content, list[RankFacts]]] = {}
        wanted: dict[str, set[Content]] = {}
        for host, manifest in readers:
            wanted.setdefault(host, set()).update(wanted_of(manifest))
        self._wanted = {content for contents in wanted.values() for content in contents}
        on_host: dict[str, list[RankFacts]] = {host: [] for host in wanted}
        for rank in ranks:
            if rank.host in on_host:
                on_host[rank.host].append(rank)
        far: set[Content] = set()
        for host, contents in wanted.items():
            self._near[host] = self._ranks_with(contents, on_host[host])
            far |= contents - self._near[host].keys()
        self._far = self._ranks_with(far, ranks)

    def _held_by(self, rank: RankFacts) -> Manifest:
        return rank.manifests.get(self._cut[rank.rank].number, ())

    def _ranks_with(
        self, contents: Collection[Content], ranks: Sequence[RankFacts]
    ) -> dict[Content, list[RankFacts]]:
        found: dict[Content, list[RankFacts]] = {content: [] for content in contents}
        missing = set(contents)
        digests = {digest for _, digest in contents}  # tells in a moment what nobody has asked for
        for rank in ranks:
            if not missing:
                break
            manifest = self._held_by(rank)
            if digests.isdisjoint([buffer.digest for buffer in manifest]):
                continue
            for content in missing.intersection([(buffer.bytes, buffer.digest) for buffer in manifest]):
                holders = found[content]
                holders.append(rank)
                if len(holders) == self._enough:
                    missing.remove(content)
        return {content: holders for content, holders in found.items() if holders}

    def _handles_of(self, rank: RankFacts) -> dict[Content, list[int]]:
        if rank.rank not in self._handles:
            handles: dict[Content, list[int]] = {}
            for buffer in self._held_by(rank):
                if (content := _content(buffer)) in self._wanted and content is not None:
                    handles.setdefault(content, []).append(buffer.handle)
            self._handles[rank.rank] = handles
        return self._handles[rank.rank]

    def match(self, wanted: Manifest, host: str, turn: int = 0) -> tuple[list[Copy], list[BufferFacts]]:
        """Pair what a reader needs with equal content: (copies, what has none).

        `turn`: how many readers came before it.  Among equals of one rank the n-th wanted one takes the
        n-th offered one.
        """
        taken: Counter[Content] = Counter()
        copies: list[Copy] = []
        missing: list[BufferFacts] = []
        for buffer in wanted:
            if not needs_replica(buffer):
                continue
            content = _content(buffer)
            holders = content and (self._near[host].get(content) or self._far.get(content))
            if not content or not holders:
                missing.append(buffer)
                continue
            source = holders[turn % len(holders)]
            equals = self._handles_of(source)[content]
            handle = equals[taken[content] % len(equals)]
            taken[content] += 1
            others = itertools.islice((other for other in equals if other != handle), MOST_OTHERS)
            copies.append(Copy(buffer.handle, source.rank, handle, *content, tuple(others)))
        return copies, missing


def replicated_handles(manifests: Mapping[int, Manifest]) -> dict[int, frozenset[int]]:
    """Per rank the handles whose content some other rank holds too; `manifests` are those of one cut."""
    holders: dict[Content, set[int]] = {}
    for rank, manifest in manifests.items():
        for buffer in manifest:
            if buffer.digest is not None:
                holders.setdefault((buffer.bytes, buffer.digest), set()).add(rank)
    return {
        rank: frozenset(
            buffer.handle
            for buffer in manifest
            if buffer.digest is not None and len(holders[buffer.bytes, buffer.digest]) > 1
        )
        for rank, manifest in manifests.items()
    }


class ReplicaTracker:
    """Believes in a replica once two successive checks agreed: one may be chance (two zeroed buffers)."""

    def __init__(self) -> None:
        self._previous: dict[int, frozenset[int]] = {}

    def check(self, manifests: Mapping[int, Manifest]) -> dict[int, frozenset[int]]:
        """Feed the manifests of a cut; answers the handles per rank that need no shadow from here on."""
        now = replicated_handles(manifests)
        believed = {rank: handles & self._previous.get(rank, frozenset()) for rank, handles in now.items()}
        self._previous = now
        return believed

    def forget(self) -> None:
        """After a recovery everything is checked twice again."""
        self._previous = {}


Group = tuple[tuple[int, int], ...]
"""Buffers that are replicas of each other: (rank, handle), by rank."""
DigestReader = Callable[[int, list[int]], list[int | None]]
"""(rank, handles) -> their digests at the commit that is looked at."""
Points = Mapping[int, tuple[int, int]]
"""Rank -> (optimizer steps, records of the minibatch behind them) at that commit."""

_Agreement = tuple[Content, int]
"""What a group last agreed on, and how often that had changed."""
AGREED_CHANGES = 2
"""So often a group's content must have changed and agreed again before a difference means corruption."""


A_FEW_NUMBERS = 16
"""Bytes of content that two ranks may well come to by chance: each counts something, and has as many once."""
LARGEST_ZEROS = 16 << 20
"""Bytes of content that is compared with zeros, which are made for that."""


@dataclass(frozen=True)
class Deviation:
    """Replicas that differ.  `suspects`: ranks outvoted by a majority; none where there is no majority."""

    group: Group
    suspects: tuple[int, ...]

    def __str__(self) -> str:
        holders = ", ".join(f"buffer {handle} of rank {rank}" for rank, handle in self.group)
        if not self.suspects:
            return f"replicas differ: {holders}"
        return (
            f"rank {', '.join(map(str, self.suspects))} differs from the majority of the replicas {holders}"
        )


class ReplicaGroups:
    """Finds state that should equal its replicas and does not (design.md §7).

    Two buffers that are equal by chance (zeroes, counters) must not become a group: only content of which
    each rank has one buffer counts, and only after it changed and agreed again `AGREED_CHANGES` times.  What
    was a group is one until a member is gone or its difference was found to be the program's own.  And
    only ranks that stand at the same point of the program are compared: a cut between collectives may find
    one before, another one behind a layer that changes what both have (a server that ran out of log commits
    wherever it stands).
    """

    def __init__(self) -> None:
        self._agreed: dict[Group, _Agreement] = {}
        self._columns: dict[tuple[int, ...], list[Group]] = {}
        self._distrusted: set[Group] = set()

    def learn(self, manifests: Mapping[int, Manifest], points: Points) -> None:
        """Feed the manifests of one cut; a rank without one leaves what is known of it as it is."""
        held = {
            rank: {buffer.handle: buffer for buffer in manifest}
            for rank, manifest in manifests.items()
            if manifest
        }
        now: dict[Group, _Agreement] = {}
        for group, known in self._agreed.items():
            if any(rank not in held for rank, _ in group) or not _at_one_point(_ranks(group), points):
                now[group] = known  # this cut says nothing about it
            elif (
                agreed := _looked_at(known, [held[rank].get(handle) for rank, handle in group])
            ) is not None:
                now[group] = agreed
        taken = {member for group in now for member in group}
        holders: dict[Content, list[tuple[int, int]]] = {}
        for rank in sorted(held):
            for buffer in held[rank].values():
                if (content := _content(buffer)) is not None and (rank, buffer.handle) not in taken:
                    holders.setdefault(content, []).append((rank, buffer.handle))
        for content, members in holders.items():
            group = tuple(members)
            if len(group) < 2 or len(set(_ranks(group))) < len(group) or group in self._distrusted:
                continue
            if _at_one_point(_ranks(group), points):
                now[group] = content, 0
        self._agreed = now
        self._columns = {}
        for group, (_, changes) in now.items():
            if changes == AGREED_CHANGES and group not in self._distrusted:
                self._columns.setdefault(tuple(_ranks(group)), []).append(group)

    def deviations(self, read: DigestReader, points: Points) -> list[Deviation]:
        """The groups whose members differ at a cut; a member that is gone ends no other's comparison."""
        found: list[Deviation] = []
        for ranks, groups in self._columns.items():
            if not _at_one_point(ranks, points):
                continue
            columns = [read(rank, [group[place][1] for group in groups]) for place, rank in enumerate(ranks)]
            if all(column == columns[0] for column in columns):
                continue
            for group, digests in zip(groups, zip(*columns, strict=True), strict=True):
                known = [digest for digest in digests if digest is not None]
                if len(known) == len(group) and len(set(known)) > 1:
                    found.append(Deviation(group, _outvoted(ranks, known)))
        return found

    def distrust(self, groups: Sequence[Group]) -> None:
        """These differ rightly: replay made the same difference again."""
        self._distrusted.update(groups)
        for column in self._columns.values():
            column[:] = [group for group in column if group not in self._distrusted]

    def __len__(self) -> int:
        return sum(len(groups) for groups in self._columns.values())


def _looked_at(known: _Agreement, buffers: Sequence[BufferFacts | None]) -> _Agreement | None:
    """What is known of a group behind another cut; None: it was chance, or a member is gone.

    A group that is trusted stays so: its difference is for `deviations`.  So is that of one which agreed but
    once, if all members have left that content: what is replicated is written by all, and the first steps of
    a job must not be those in which nobody looks.  A few numbers have to agree as often as anything else.
    """
    before, changes = known
    contents = [_content(buffer) for buffer in buffers]
    if any(buffer is None for buffer in buffers):
        return None
    if changes == AGREED_CHANGES or None in contents:
        return known
    first = contents[0]
    if first is not None and all(content == first for content in contents):
        return first, changes + (first != before)
    if before in contents or before[0] <= A_FEW_NUMBERS or _is_zero(before):
        return None
    return before, AGREED_CHANGES


def _content(buffer: BufferFacts | None) -> Content | None:
    if buffer is None or buffer.digest is None or buffer.bytes == 0:
        return None
    return buffer.bytes, buffer.digest


def _is_zero(content: Content) -> bool:
    """Whether a small buffer is zero; what is large and was never written is hardly ever alike by chance."""
    return content[0] <= LARGEST_ZEROS and content[1] == _digest_of_zeros(content[0])


@functools.lru_cache(maxsize=64)
def _digest_of_zeros(count: int) -> int:
    return content_digest(bytes(count))


def _ranks(group: Group) -> list[int]:
    return [rank for rank, _ in group]


def _at_one_point(ranks: Sequence[int], points: Points) -> bool:
    return len({points.get(rank) for rank in ranks}) == 1


def _outvoted(ranks: Sequence[int], digests: Sequence[int]) -> tuple[int, ...]:
    (winner, votes), *_ = Counter(digests).most_common(1)
    if 2 * votes <= len(digests):
        return ()
    return tuple(rank for rank, digest in zip(ranks, digests, strict=True) if digest != winner)
