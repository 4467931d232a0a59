"""The hints that a program has reached lately: what repeats itself, and how long it takes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Iterator

_REMEMBERED = 256
"""Hints, in the order in which they were reached."""
_MEASUREMENTS = 33
"""Of the seconds to a hint of a loop's body, at most, of which the median is taken."""
_FEWEST = 8
"""Hints that a loop must explain before it counts as one."""
_SECONDS = 9
"""Of the seconds from one place to another, where there is no loop."""
_AHEAD = 64
"""Hints that are expected, at most, where there is no loop."""
Place = Hashable


def median(values: Iterable[float]) -> float:
    """Of one value or more. (The one of `statistics` takes longer to import than all of this package.)"""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


class Recent:
    """Places, and the program's seconds to each from the one before it."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self._seconds: list[float] = []
        self._apart: dict[tuple[Place, Place], deque[float]] = {}

    def reached(self, place: Place, seconds: float) -> None:
        if self.places:
            pair = (self.places[-1], place)
            self._apart.setdefault(pair, deque(maxlen=_SECONDS)).append(seconds)
        self.places.append(place)
        self._seconds.append(seconds)
        if len(self.places) > 2 * _REMEMBERED:
            del self.places[:-_REMEMBERED], self._seconds[:-_REMEMBERED]

    def matches(self) -> list[int]:
        """For each number of hints back, 1 and more: how many hints up to there are the same as the last
        ones.

        The Z function of the places in reverse: linear in their number.
        """
        places = self.places[: -_REMEMBERED - 1 : -1]
        found = [0] * len(places)
        begin = end = 0
        for back in range(1, len(places)):
            same = min(found[back - begin], end - back) if back < end else 0
            while back + same < len(places) and places[same] == places[back + same]:
                same += 1
            found[back] = same
            if back + same > end:
                begin, end = back, back + same
        return found

    def body(self) -> int | None:
        """How many hints the body of the loop has that explains the last half, twice or more; None if none
        does."""
        matches = self.matches()
        for hints, same in enumerate(matches):
            if hints and hints + same >= max(2 * hints, len(matches) / 2, _FEWEST):
                return hints
        return None

    def seconds(self, hints: int) -> tuple[list[float], float]:
        """For a body of so many hints, the last one of which was reached last: the median seconds to each,
        and what an iteration takes on average beside the sum of these.
        """
        iterations = max(1, min(len(self.places) // hints, _MEASUREMENTS))
        last = self._seconds[-iterations * hints :]
        medians = [median(last[hint::hints]) for hint in range(hints)]
        total = math.fsum(medians) * iterations
        return medians, math.fsum(last) / total if total else 1.0

    def between(self, place: Place, following: Place) -> float:
        """The median seconds from one place to the next, wherever that was; nought if it never was."""
        return median(self._apart.get((place, following), [0.0]))

    def expected(self) -> Iterator[tuple[Place, float]]:
        """The hints that are likely to come, and in how many seconds: those that came after the longest same
        past."""
        matches, after = self.matches(), 0.0
        back = max(range(len(matches)), key=matches.__getitem__, default=0)
        if not matches or not matches[back]:
            return
        begin = len(self.places) - 1 - back
        for index in range(begin, min(begin + _AHEAD, len(self.places) - 1)):
            place, following = self.places[index : index + 2]
            after += self.between(place, following)
            yield following, after
