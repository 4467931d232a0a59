"""Ranks in sentences: one by one where they are few, and by ranges in a job of thousands."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TypeVar

FEW = 8
Place = TypeVar("Place", bound=Hashable)


def named(ranks: Iterable[int]) -> str:
    """`0, 5, 2`; of more than a few, in order and by ranges: `0-511, 513-1023`."""
    all_of_them = list(ranks)
    if len(all_of_them) <= FEW:
        return ", ".join(map(str, all_of_them))
    ranks = sorted(set(all_of_them))
    breaks = [place for place in range(1, len(ranks)) if ranks[place] - ranks[place - 1] > 1]
    runs = [(ranks[begin], ranks[end - 1]) for begin, end in itertools.pairwise([0, *breaks, len(ranks)])]
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def placed(where: Mapping[int, Place], said: Callable[[Place], str] = str) -> str:
    """`rank 0 at commit 5, rank 1 at commit 4`, where `said` makes `at commit 5` and so on of a place;
    of more than a few, those at one place together: `rank 0-6, 8 at commit 5, rank 7 at commit 4`."""
    if len(where) <= FEW:
        return ", ".join(f"rank {rank} {said(where[rank])}" for rank in sorted(where))
    together: dict[Place, list[int]] = defaultdict(list)
    for rank in sorted(where):
        together[where[rank]].append(rank)
    return ", ".join(f"rank {named(ranks)} {said(place)}" for place, ranks in together.items())
