"""The points of the sweep, and the ledger of those that have been run."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from sweep_models import COMMITS

FAULTS = ("kill-server", "call-error", "stop-server", "sticky-error")
RANKS = 2
FIRST = 6
"""The first iteration to be struck: shapes are learnt, replicas known."""
SPACING = 2
"""Iterations from one fault to the next: a rank may run into the next one before its peer is back."""
POINTS_PER_RUN = 60


@dataclass(frozen=True, order=True)
class Point:
    """A fault just before record `call` of the `commit`-th minibatch of an iteration, on one rank."""

    model: str
    fault: str
    commit: int
    call: int

    @property
    def rank(self) -> int:
        """Both ranks in turn: they run the same program."""
        return self.call % RANKS


@dataclass(frozen=True)
class Outcome:
    """What became of a point."""

    point: Point
    plan: str
    phase: str
    identical: bool
    detect_s: float
    total_s: float
    problem: str = ""


def all_points(calls: dict[str, list[int]], models: Iterable[str], faults: Iterable[str]) -> list[Point]:
    """`calls[model][commit]`: records in that minibatch."""
    return [
        Point(model, fault, commit, call)
        for model in models
        for fault in faults
        for commit in range(COMMITS[model])
        for call in range(1, calls[model][commit] + 1)
    ]


def sample(points: list[Point], count: int, seed: int) -> list[Point]:
    """A seeded choice with equally many of every model and fault, as far as they have so many."""
    chosen: list[Point] = []
    groups: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        groups.setdefault((point.model, point.fault), []).append(point)
    for group in groups.values():
        size = min(len(group), -(-count // len(groups)))
        chosen += random.Random(f"{seed} {group[0]}").sample(group, size)
    return chosen


def runs(points: list[Point], per_run: int = POINTS_PER_RUN) -> Iterator[list[Point]]:
    """Points of one model and fault that one training can hold."""
    groups: dict[tuple[str, str], list[Point]] = {}
    for point in sorted(points):
        groups.setdefault((point.model, point.fault), []).append(point)
    for group in groups.values():
        for first in range(0, len(group), per_run):
            yield group[first : first + per_run]


def iterations(count: int) -> int:
    """Of a training that holds `count` faults."""
    return FIRST + SPACING * count + 3


def iteration_of(place: int) -> int:
    """The iteration, from 0, in which the `place`-th point of a run strikes."""
    return FIRST + SPACING * place


def step_of(point: Point, place: int) -> int:
    """The log's minibatch, from 1, in which it does."""
    return COMMITS[point.model] * iteration_of(place) + point.commit + 1


class Ledger:
    """Outcomes in a file, one JSON line each, so that a sweep goes on where it stopped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.outcomes: dict[Point, Outcome] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                point = Point(**entry.pop("point"))
                self.outcomes[point] = Outcome(point, **entry)

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """Keep them."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            for outcome in outcomes:
                self.outcomes[outcome.point] = outcome
                file.write(json.dumps(asdict(outcome)) + "\n")
