"""Who writes which bytes: what several ranks hold, one of them writes (PCcheck, section 3.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SMALL_BYTES = 4096
"""Below this a rank writes its own: to say who has it takes as long."""


class Holding(NamedTuple):
    """A buffer in one rank's snapshot; `digest` is the XXH3-64 of its content.

    A tuple: all buffers of all ranks are made anew for each snapshot.
    """

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
    other_holders: Mapping[int, Holder]
    """By handle; those that it has twice are in here too."""


def split(holdings: Mapping[int, Sequence[Holding]]) -> dict[int, Part]:
    """Each content once, bytes spread evenly over the ranks that hold it; the same for the same input."""
    groups: dict[tuple[int, int], list[tuple[int, Holding]]] = {}
    load: dict[int, int] = {}
    for rank, buffers in sorted(holdings.items()):
        small = 0
        for buffer in buffers:
            if buffer.bytes < SMALL_BYTES:
                small += buffer.bytes
            else:
                groups.setdefault((buffer.bytes, buffer.digest), []).append((rank, buffer))
        load[rank] = small
    other_holders: dict[int, dict[int, Holder]] = {rank: {} for rank in holdings}
    if any(len(group) > 1 for group in groups.values()):  # else everybody writes all that is its own
        for (count, _), group in sorted(groups.items(), key=lambda item: (-item[0][0], item[1][0][1].handle)):
            _, writer, handle = min((load[rank], rank, buffer.handle) for rank, buffer in group)
            load[writer] += count
            for rank, buffer in group:
                if (rank, buffer.handle) != (writer, handle):
                    other_holders[rank][buffer.handle] = Holder(writer, handle)
    return {rank: _part(buffers, other_holders[rank]) for rank, buffers in holdings.items()}


def _part(buffers: Sequence[Holding], other_holders: Mapping[int, Holder]) -> Part:
    if not other_holders:
        return Part(tuple(buffers), other_holders)
    return Part(tuple(buffer for buffer in buffers if buffer.handle not in other_holders), other_holders)
