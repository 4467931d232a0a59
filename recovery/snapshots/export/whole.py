"""Puts a tensor together whose blocks lie on several ranks (DTensor: FSDP, tensor parallelism)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch


class NotWhole(ValueError):
    """Why the blocks of a tensor cannot be put together, in words that follow its name."""


@dataclass(frozen=True)
class Block:
    """`content` lies at `at` of the whole, in elements by dimension."""

    at: tuple[int, ...]
    content: torch.Tensor

    @property
    def end(self) -> tuple[int, ...]:
        """Behind it."""
        return tuple(begin + count for begin, count in zip(self.at, self.content.shape, strict=True))

    def meets(self, other: Block) -> bool:
        """Whether they share an element."""
        return all(a < d and c < b for a, b, c, d in zip(self.at, self.end, other.at, other.end, strict=True))


def put_together(size: tuple[int, ...], blocks: Iterable[Block]) -> torch.Tensor:
    """The whole of that size; replicas of a block must be equal.  Raises NotWhole unless they cover it."""
    kept: list[Block] = []
    for block in blocks:
        alike = [one for one in kept if one.meets(block)]
        if not alike:
            kept.append(block)
        elif len(alike) > 1 or (alike[0].at, alike[0].end) != (block.at, block.end):
            raise NotWhole("in blocks that overlap")
        elif not _same_bits(alike[0].content, block.content):
            raise NotWhole("in blocks of which replicas differ")
    kinds = {block.content.dtype for block in kept}
    # Disjoint blocks of as many elements cover it; nothing is allocated that they do not fill.
    if len(kinds) != 1 or sum(block.content.numel() for block in kept) != math.prod(size):
        raise NotWhole("in blocks that do not cover it")
    whole = torch.empty(size, dtype=kinds.pop())
    for block in kept:
        region = tuple(slice(begin, end) for begin, end in zip(block.at, block.end, strict=True))
        whole[region] = block.content
    return whole


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    first, second = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(first, second)
