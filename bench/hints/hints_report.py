"""From outcomes to docs/reports/hints.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hints_attempts import Outcome

HEAD = """# Checkpoints at hints: paper 000's experiment

Written by `make bench-hints`; not to be edited. A training of a small convolutional network on MNIST's test
images ([examples/resumable_mnist.py](../../examples/resumable_mnist.py)), with a hint at the end of each
iteration and of each epoch, on one thread (paper 000 §4.1). The paper has such a training undisturbed
alone, and found no difference; here it is also killed, at times that are exponentially distributed, by a
supervisor that starts it again at once.

- **hints**: `@checkpoints(overhead=…, failure_rate=λ)`; when to save is decided from what is measured as it
  runs.
- **fixed**: `@checkpoints(every=k)`: each k-th hint, with the k that fits the overhead by what a checkpoint
  and an iteration took in a run before, which hints do not need.
- **none**: the plain function.

Each result is that of the undisturbed plain function, bit for bit; else there would be no report. Medians
of {runs} runs, in brackets the least and the most. A run's times are held against those of the plain
function in the same round. Attempts are forks of a process that has imported PyTorch and read the images,
so starting Python is not in the times; reading the newest checkpoint is. **Lost**: from the last durable
checkpoint, or the start of an attempt, until it was killed.
"""
UNDISTURBED = """
## Undisturbed

| way | allowed | seconds | over none | checkpoints | seconds in them | part of the rest |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
"""
KILLED = """
## Killed at λ

{failures}

| way | allowed | seconds | over none, undisturbed | kills | lost seconds | checkpoints |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
"""
BUSY = """

**Others were at work on this machine meanwhile**: seconds are not to be held against each other. What part of
a run its checkpoints took is, since both were measured in the same run."""
_BUSY = 0.5
"""Of the load before the first run."""
Number = Callable[[Outcome], float]


@dataclass(frozen=True)
class Facts:
    """What a report says besides the outcomes; times in seconds."""

    machine: dict[str, Any]
    seed: int
    rate: float
    iterations: int
    step: float
    checkpoint: float
    every: dict[str, int]
    """For each allowed overhead, as it is written, the k of the fixed way."""
    took: float
    command: str


def markdown(facts: Facts, rounds: Sequence[Sequence[Outcome]]) -> str:
    """`rounds`: the outcomes of each."""
    plain = [_plain(each) for each in rounds]
    often = facts.rate * statistics.median(plain)
    failures = (
        f"λ = {facts.rate:.3f} per second: {often:.1f} failures, on average, in the time that the plain "
        "function takes. The draws of a round are the same for all ways."
    )
    ways = list(dict.fromkeys((each.way, each.overhead or 0.0) for each in rounds[0]))
    ways.sort(key=lambda way: (way[1], way[0]))
    return (
        HEAD.format(runs=len(rounds))
        + UNDISTURBED
        + "".join(_undisturbed(_of(rounds, way, False), way, plain) for way in ways)
        + KILLED.format(failures=failures)
        + "".join(_killed(_of(rounds, way, True), way, plain) for way in ways)
        + _foot(facts)
    )


def _plain(outcomes: Sequence[Outcome]) -> float:
    return next(each.seconds for each in outcomes if each.way == "none" and not each.failing)


def _of(rounds: Sequence[Sequence[Outcome]], way: tuple[str, float], failing: bool) -> list[Outcome]:
    return [
        each
        for outcomes in rounds
        for each in outcomes
        if (each.way, each.overhead or 0.0) == way and each.failing == failing
    ]


def _undisturbed(outcomes: list[Outcome], way: tuple[str, float], plain: list[float]) -> str:
    return _row(
        way,
        _spread(outcomes, lambda each: each.seconds, 2),
        _ratio(outcomes, plain),
        _spread(outcomes, lambda each: each.checkpoints, 0),
        _spread(outcomes, lambda each: each.saving, 2),
        _spread(outcomes, lambda each: 100 * each.saving / (each.seconds - each.saving), 1, " %"),
    )


def _killed(outcomes: list[Outcome], way: tuple[str, float], plain: list[float]) -> str:
    return _row(
        way,
        _spread(outcomes, lambda each: each.seconds, 2),
        _ratio(outcomes, plain),
        _spread(outcomes, lambda each: each.kills, 0),
        _spread(outcomes, lambda each: each.lost, 2),
        _spread(outcomes, lambda each: each.checkpoints, 0),
    )


def _row(way: tuple[str, float], *cells: str) -> str:
    name, overhead = way
    return f"| {' | '.join([name, f'{overhead:.0%}' if overhead else '–', *cells])} |\n"


def _spread(outcomes: list[Outcome], number: Number, digits: int, unit: str = "") -> str:
    return _shown([number(each) for each in outcomes], digits, unit)


def _ratio(outcomes: list[Outcome], plain: list[float]) -> str:
    return _shown([each.seconds / alone for each, alone in zip(outcomes, plain, strict=True)], 3, "")


def _shown(values: list[float], digits: int, unit: str) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    if high == low:
        return f"{middle:.{digits}f}{unit}"
    return f"{middle:.{digits}f}{unit} ({low:.{digits}f}–{high:.{digits}f})"


def _foot(facts: Facts) -> str:
    machine = facts.machine
    every = ", ".join(f"{k} at {float(overhead):.0%}" for overhead, k in facts.every.items())
    said = [
        f"{facts.iterations} hints in each training; before the first round, an iteration took",
        f"{1000 * facts.step:.1f} ms and a checkpoint {1000 * facts.checkpoint:.1f} ms,",
        f"which makes k {every}.",
    ]
    made = [
        f"`{facts.command}`, seed {facts.seed}, at commit {machine['commit']}, {machine['date']};",
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_before']:.2f} before;",
        f"PyTorch {machine['torch']}; {facts.took:.0f} s.",
    ]
    busy = machine["load_before"] > _BUSY
    return "\n" + " ".join(said) + (BUSY if busy else "") + "\n\n" + " ".join(made) + "\n"
