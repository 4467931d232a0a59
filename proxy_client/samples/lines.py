"""The lines of a rank's file: those of a SampleLog (understudy/data/records.py), and what the proxy knows.

Each is a JSON object of its own.  They are numbered (`line`) within an attempt, so that one that is missing
is missed; where the numbers go back, the worker was brought back to an image of its process, and does again
what came behind.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

SampleId = int | str
LONGEST_ID = 200
"""Letters of an index that is neither a number nor a text."""


def beginning(attempt: int, restart: int, rank: int, world: int, left_out: int) -> str:
    """A process begins.  `restart`: the launcher's count.  `left_out`: batches before it used its device."""
    return json.dumps(
        {
            "line": 0, "attempt": attempt, "restart": restart, "rank": rank, "world_size": world,
            "own_ids": False, "by": "proxyrun", "left_out": left_out,
        }
    )  # fmt: skip


def loader(line: int, number: int, facts: dict[str, Any]) -> str:
    """A loader that was not seen before."""
    return json.dumps({"line": line, "loader": number} | facts)


def batch(line: int, loader: int, epoch: int, step: int, ids: Sequence[SampleId] | None) -> str:
    """A batch that was handed out; without `ids` nobody knows what is in it."""
    place = f'{{"line":{line},"loader":{loader},"epoch":{epoch},"step":{step}'
    if ids is None:
        return place + "}"
    plain = set(map(type, ids)) <= {int}  # a list of numbers is written by Python as JSON would write it
    return f'{place},"count":{len(ids)},"ids":{str(ids) if plain else json.dumps(ids)}}}'


def minibatch(line: int, number: int, payloads: int, size: int, digest: int) -> str:
    """What an optimizer's step had on its device anew, since the step before."""
    return _content(line, number, payloads, size, digest) + "}"


def ending(line: int, number: int, payloads: int, size: int, digest: int) -> str:
    """The process ends in order; behind its last minibatch came so much."""
    return _content(line, number, payloads, size, digest) + ',"end":true}'


def _content(line: int, number: int, payloads: int, size: int, digest: int) -> str:
    return (
        f'{{"line":{line},"minibatch":{number},"payloads":{payloads},"bytes":{size},"content":"{digest:016x}"'
    )


def ids_of(index: Any, is_batch: bool) -> list[SampleId] | None:
    """What a sampler has yielded, as plain numbers and texts; None: it yields neither.

    `is_batch`: the loader collates, so that it is several indices.
    """
    if is_batch or isinstance(index, list) or getattr(index, "ndim", 0) == 1:
        if hasattr(index, "tolist"):
            index = index.tolist()
        index = index if type(index) is list else _listed(index)
        if index is None or set(map(type, index)) == {int}:
            return index  # type: ignore[no-any-return]
        ids = [_plain(one) for one in index]
        return None if None in ids else ids  # type: ignore[return-value]
    one = _plain(index)
    return None if one is None else [one]


def _listed(index: Any) -> list[Any] | None:
    return list(index) if isinstance(index, (tuple, range)) else None


def _plain(one: Any) -> SampleId | None:
    if type(one) in (int, str):
        return one  # type: ignore[no-any-return]
    if getattr(one, "ndim", None) == 0 and type(value := one.item()) is int:
        return value
    if isinstance(one, tuple) and all(type(part) in (int, str) for part in one):
        return repr(one)[:LONGEST_ID]
    return None
