"""Which rank has my bytes?  Equal content is found by size and digest (design.md §7)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recovery.facts import BufferFacts, Manifest

Content = tuple[int, int]
"""(bytes, digest)"""


@dataclass(frozen=True)
class Copy:
    """One buffer to fetch: `handle` of the restored rank from `source_handle` of rank `source`."""

    handle: int
    source: int
    source_handle: int
    bytes: int
    digest: int


def needs_replica(buffer: BufferFacts) -> bool:
    """Whether a commit alone cannot rebuild this buffer."""
    return not buffer.shadowed and buffer.bytes > 0


def match(wanted: Manifest, offers: Mapping[int, Manifest]) -> tuple[list[Copy], list[BufferFacts]]:
    """Pair what `wanted` needs with equal content in `offers` (rank -> manifest): (copies, what has none).

    Among equals the n-th wanted one takes the n-th offered one; lower ranks offer first.
    """
    offered: dict[Content, list[tuple[int, int]]] = {}
    for rank in sorted(offers):
        for buffer in offers[rank]:
            if buffer.digest is not None:
                offered.setdefault((buffer.bytes, buffer.digest), []).append((rank, buffer.handle))
    taken: dict[Content, int] = {}
    copies: list[Copy] = []
    missing: list[BufferFacts] = []
    for buffer in wanted:
        if not needs_replica(buffer):
            continue
        content = (buffer.bytes, buffer.digest if buffer.digest is not None else -1)
        equals = offered.get(content)
        if not equals:
            missing.append(buffer)
            continue
        ordinal = taken.get(content, 0)
        taken[content] = ordinal + 1
        source, handle = equals[ordinal % len(equals)]
        copies.append(Copy(buffer.handle, source, handle, *content))
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
