"""What has changed from one description of a worker's state to the next: most of it never does.

Pure.  A change is a path into the JSON and the value that is there from then on.
"""

from __future__ import annotations

import json
import marshal
import zlib
from collections.abc import Iterator
from typing import Any

LARGEST = 256 << 20
"""Bytes of a description; a million tensors take about as many."""
_LEVEL = 1
_WITHOUT_REFERENCES = 2
"""Version of marshal: equal values give equal bytes."""

Path = list[Any]


class BadChanges(ValueError):
    """They do not fit what they are said to change."""


def changes(before: Any, after: Any) -> Iterator[tuple[Path, Any]]:
    """Paths, and values of `after` at them; those below a path that is told are not told again."""
    if _same(before, after):
        return
    if isinstance(before, dict) and isinstance(after, dict) and list(before) == list(after):
        for key, value in after.items():
            for path, changed in changes(before[key], value):
                yield [key, *path], changed
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, value in enumerate(after):
            for path, changed in changes(before[index], value):
                yield [index, *path], changed
    else:
        yield [], after


def _same(one: Any, other: Any) -> bool:
    """By type and bits, unlike ==, for which 0.0 is -0.0 and True is 1; and as fast."""
    return marshal.dumps(one, _WITHOUT_REFERENCES) == marshal.dumps(other, _WITHOUT_REFERENCES)


def changed(before: Any, told: Any) -> Any:
    """`before` with those changes, in place; raises BadChanges."""
    try:
        for path, value in told:
            if not path:
                before = value
                continue
            *way, last = path
            place = before
            for step in way:
                place = place[step]
            place[last]
            place[last] = value
    except (LookupError, TypeError, ValueError) as problem:
        raise BadChanges("changes of a description do not fit it") from problem
    return before


class Descriptions:
    """In the order of their steps, each as the difference to the one before."""

    def __init__(self) -> None:
        self._last: Any = None

    def encode(self, description: bytes) -> bytes:
        """Raises ValueError where it is no JSON, and RecursionError."""
        now = json.loads(description)
        if self._last is None:
            content: dict[str, Any] = {"all": now}
        else:
            content = {"changes": list(changes(self._last, now))}
        self._last = now
        return zlib.compress(json.dumps(content).encode(), _LEVEL)

    def decode(self, content: bytes) -> None:
        """Take the next one; raises BadChanges."""
        opened = zlib.decompressobj()
        try:
            text = opened.decompress(content, LARGEST)
            if not opened.eof:
                raise BadChanges("a description is too large, or cut off")
            told = json.loads(text)
            if "all" in told:
                self._last = told["all"]
            elif self._last is None:
                raise BadChanges("changes of a description come before it")
            else:
                self._last = changed(self._last, told["changes"])
        except (zlib.error, KeyError, TypeError, ValueError, RecursionError) as problem:
            raise BadChanges(str(problem) or "a description makes no sense") from problem

    @property
    def last(self) -> bytes:
        """The description of the newest step; empty if there was none."""
        return json.dumps(self._last).encode() if self._last is not None else b""
