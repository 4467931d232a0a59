"""Who writes which bytes: what several ranks hold, one of them writes (PCcheck, section 3.1)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SMALL_BYTES = 4096
"""Below this a rank writes its own: to say who has it takes as long."""


@dataclass(frozen=True)
class Holding:
    """A buffer in one rank's snapshot; `digest` is the XXH3-64 of its content."""

    handle: int
    bytes: int
    digest: int


@dataclass(frozen=True)
class Holder:
    """Where the same bytes are written."""

    rank: int
    handle: int


@dataclass(frozen=True)
class Part:
    """What one rank writes, and of what it only says who does."""

    own: tuple[Holding, ...]
    elsewhere: Mapping[int, Holder]
    """By handle; those that it has twice are in here too."""


def split(holdings: Mapping[int, Sequence[Holding]]) -> dict[int, Part]:
    """Each content once, bytes spread evenly over the ranks that hold it; the same for the same input."""
    holders: dict[tuple[int, int], list[Holder]] = defaultdict(list)
    load: dict[int, int] = {}
    for rank, buffers in sorted(holdings.items()):
        load[rank] = sum(buffer.bytes for buffer in buffers if buffer.bytes < SMALL_BYTES)
        for buffer in buffers:
            if buffer.bytes >= SMALL_BYTES:
                holders[(buffer.bytes, buffer.digest)].append(Holder(rank, buffer.handle))
    writer: dict[Holder, Holder] = {}
    for (count, _), group in sorted(holders.items(), key=lambda item: (-item[0][0], item[1][0].handle)):
        chosen = min(group, key=lambda holder: (load[holder.rank], holder.rank, holder.handle))
        load[chosen.rank] += count
        writer |= dict.fromkeys(group, chosen)
    return {rank: _part(rank, buffers, writer) for rank, buffers in holdings.items()}


def _part(rank: int, buffers: Sequence[Holding], writer: Mapping[Holder, Holder]) -> Part:
    own, elsewhere = [], {}
    for buffer in buffers:
        here = Holder(rank, buffer.handle)
        if writer.get(here, here) == here:
            own.append(buffer)
        else:
            elsewhere[buffer.handle] = writer[here]
    return Part(tuple(own), elsewhere)
