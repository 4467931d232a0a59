"""Many simulated months beside what the formulas say, and which input matters most."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from understudy.recovery.base.errors import BadInput
from understudy.recovery.costs.bill import HOURS_PER_MONTH
from understudy.recovery.costs.given.inputs import Inputs
from understudy.recovery.costs.models.simulation import one_job
from understudy.recovery.costs.models.ways import Way, waste_of

MONTH_S = HOURS_PER_MONTH * 3600
QUANTILE = 1.96
"""Of the normal distribution, for 95 % around a mean of many months."""


@dataclass(frozen=True)
class Simulated:
    """A way, over many months; fractions of all time."""

    way: Way
    mean: float
    low: float
    high: float
    formula: float
    failures: int
    moves: int
    waited: float
    """For devices."""
    rungs: Mapping[str, int]


def simulated(inputs: Inputs, way: Way, months: int, first_seed: int = 0) -> Simulated:
    """One job a month, each from its own seed.  Raises BadInput."""
    found = [one_job(inputs, way, MONTH_S, first_seed + number) for number in range(months)]
    fractions = [account.fraction for account in found]
    mean = statistics.fmean(fractions)
    off = QUANTILE * statistics.stdev(fractions) / math.sqrt(months) if months > 1 else 0.0
    return Simulated(
        way, mean, mean - off, mean + off, waste_of(way, inputs).fraction,
        sum(account.failures for account in found), sum(account.moves for account in found),
        statistics.fmean(account.waiting for account in found) / MONTH_S,
        dict(sum((account.rungs for account in found), Counter())),
    )  # fmt: skip


@dataclass(frozen=True)
class Influence:
    """What becomes of w_f if one input is halved, and doubled."""

    name: str
    halved: float
    doubled: float


def influences(inputs: Inputs, way: Way) -> list[Influence]:
    """How much each positive number that can be both matters, largest first; for a tornado."""
    tree = inputs.model_dump(mode="json", exclude_none=True)
    found = []
    for path, value in _numbers(tree, ()):
        both = []
        for factor in (0.5, 2.0):
            try:
                changed = Inputs.model_validate(_with(tree, path, value * factor))
                both.append(waste_of(way, changed).fraction)
            except (ValidationError, BadInput):
                break
        if len(both) == 2 and both[0] != both[1]:
            found.append(Influence(".".join(path), *both))
    return sorted(found, key=lambda one: -abs(one.doubled - one.halved))


def _numbers(tree: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], float]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, (*above, name))
        elif isinstance(value, float) and value > 0:
            yield (*above, name), value


def _with(tree: Mapping[str, Any], path: tuple[str, ...], value: float) -> dict[str, Any]:
    head, *rest = path
    return {**tree, head: _with(tree[head], tuple(rest), value) if rest else value}
