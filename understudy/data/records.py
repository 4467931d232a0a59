"""The lines of a log of samples: what they hold, and what counts as one (paper 002 §4.9, Table 1)."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from understudy.durable import json_object

from .plan import EpochPlan

SampleId = int | str
_BITS = 128
_LARGEST = 2**53
"""Of the numbers in a record: JSON's readers in other languages keep no more."""


@dataclass(frozen=True)
class Beginning:
    """The line with which a rank begins an attempt."""

    attempt: int
    rank: int
    world_size: int
    plan: EpochPlan
    own_ids: bool
    """Whether the ids are the data set's own; else they are indices, and the plan says which belong where."""

    def line(self) -> str:
        return json.dumps(
            {
                "attempt": self.attempt,
                "rank": self.rank,
                "world_size": self.world_size,
                "own_ids": self.own_ids,
            }
            | self.plan.as_fields()
        )


@dataclass(frozen=True)
class Used:
    """The samples that one rank has used in one step, in their order; without `ids`, only count and hash."""

    epoch: int
    step: int
    count: int
    hash: int
    ids: Sequence[SampleId] | None

    def line(self) -> str:
        fields: dict[str, Any] = {"epoch": self.epoch, "step": self.step, "count": self.count}
        fields["hash"] = f"{self.hash:032x}"
        if self.ids is not None:
            fields["ids"] = list(self.ids)
        return json.dumps(fields)


def multiset_hash(ids: Iterable[SampleId]) -> int:
    """Of the ids, whatever their order, 128 bits.

    The hashes of ranks add up, modulo 2^128, to that of the step: runs with different numbers of ranks can be
    compared by hashes alone.
    """
    total = 0
    for one in ids:
        total += int.from_bytes(hashlib.blake2b(repr(one).encode(), digest_size=_BITS // 8).digest(), "big")
    return total % 2**_BITS


def added(hashes: Iterable[int]) -> int:
    """The hash of several multisets together."""
    return sum(hashes) % 2**_BITS


def parse(line: bytes) -> Beginning | Used:
    """Raises ValueError, saying why, for what is no record."""
    fields = json_object(line)
    if fields.get("by") == "proxyrun":
        raise ValueError("it was written by proxyrun --samples, and recoveryctl samples check judges it")
    return _beginning(fields) if "attempt" in fields else _used(fields)


def _beginning(fields: Mapping[str, Any]) -> Beginning:
    attempt, rank, world = (_number(fields, name) for name in ("attempt", "rank", "world_size"))
    if not 0 <= rank < world or attempt < 1:
        raise ValueError(f"it is of attempt {attempt} and rank {rank} of {world}")
    if not isinstance(own_ids := fields.get("own_ids"), bool):
        raise ValueError("its field 'own_ids' is neither true nor false")
    for name in ("dataset_size", "global_batch"):
        _number(fields, name)
    plan = EpochPlan.of(fields)
    plan.local_batch(world)
    return Beginning(attempt, rank, world, plan, own_ids)


def _used(fields: Mapping[str, Any]) -> Used:
    epoch, step, count = (_number(fields, name) for name in ("epoch", "step", "count"))
    text, ids = fields.get("hash"), fields.get("ids")
    if not isinstance(text, str) or len(text) != _BITS // 4 or not set(text) <= set("0123456789abcdef"):
        raise ValueError("its field 'hash' is no hash")
    if ids is None:
        return Used(epoch, step, count, int(text, 16), None)
    if not isinstance(ids, list) or not all(type(one) in (int, str) for one in ids):
        raise ValueError("its field 'ids' is no list of numbers and texts")
    if (len(ids), multiset_hash(ids)) != (count, int(text, 16)):
        raise ValueError("count and hash are not those of its ids")
    return Used(epoch, step, count, int(text, 16), _compact(ids))


def _compact(ids: list[SampleId]) -> Sequence[SampleId]:
    try:
        return array("q", ids)  # type: ignore[type-var]
    except (TypeError, OverflowError):
        return tuple(ids)


def _number(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise ValueError(f"its field {name!r} is {str(value)[:40]}, which is no number from 0 to 2^53")
    return value
