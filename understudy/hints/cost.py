"""What a block costs: the seconds that failures make it repeat, on average (paper 000 §2.1).

A block is what lies between two checkpoints. At failure rate λ, one of t seconds takes (e^{λt} − 1)/λ seconds
on average until it is through, and so loses (e^{λt} − 1)/λ − t: failures come as a Poisson process, and each
sends the program back to the beginning of the block. The paper has ½ t p/(1 − p) with p = 1 − e^{−λt}, which
is ½ t (e^{λt} − 1): every failure in the middle, and the first pass alone exposed.

Both are convex, nought at t = 0, and functions of x = λt but for a factor 1/λ. All of `hints` computes with
these functions of x, which are called *curves* here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

Cost = Literal["exact", "paper"]

_LARGEST = 700.0
"""Of x: e^x is a float up to 709.7."""
_SMALL = 0.05
"""Of x: below it, e^x − 1 − x is summed as a series, because the difference would lose digits."""
_NEWTON_STEPS = 60


@dataclass(frozen=True)
class Curve:
    """A cost, without units: x = λt, and losses in units of 1/λ."""

    loss: Callable[[float], float]
    """Of a block; infinite beyond what a float holds."""
    overtaking: Callable[[float, float], float]
    """(d, debt) → the u at which loss(u + d) − loss(u) = debt, at least 0.

    A place that lies d behind another one, and costs `debt` more to reach, is the better beginning of every
    block that ends more than u behind it, and of no other: losses are convex.
    """


def expected_loss(t: float, rate: float, cost: Cost = "exact") -> float:
    """Seconds lost, on average, by a block of t seconds at `rate` failures per second (paper 000 §2.1).

    Infinite where no float is large enough. Raises ValueError for a time or a rate that is negative or not
    finite, and for another name of a cost than "exact" and "paper".
    """
    t, rate = quantity("time of a block", t), quantity("failure rate", rate)
    curve_of(cost)
    x = rate * t
    if x == 0:
        return 0.0
    if x > _LARGEST:
        return _beyond(x, t / 2 if cost == "paper" else 1 / rate)
    if cost == "paper":
        return 0.5 * t * math.expm1(x)
    return t * (_series(x) * x if x < _SMALL else (math.expm1(x) - x) / x)


def curve_of(cost: Cost) -> Curve:
    """Raises ValueError for a name that is none."""
    if cost == "exact":
        return Curve(_exact, _overtaking_exact)
    if cost == "paper":
        return Curve(_paper, _overtaking_paper)
    raise ValueError(f"There is no cost {cost!r}; take 'exact' or 'paper'.")


def quantity(name: str, value: float) -> float:
    """As a float. Raises ValueError, in one sentence, for what is no finite number from 0 on."""
    try:
        number = math.nan if isinstance(value, (str, bytes, bytearray)) else float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"The {name} is a {type(value).__name__}, no number; pass one from 0 on.") from None
    if not 0 <= number < math.inf:
        raise ValueError(f"The {name} is {str(value)[:40]!r}; pass a finite number from 0 on.")
    return number


def summed(values: Iterable[float]) -> float:
    """Without loss of digits; infinite where no float is large enough."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


def _beyond(x: float, factor: float) -> float:
    try:
        return math.exp(x + math.log(factor)) if factor else 0.0
    except OverflowError:
        return math.inf


def _series(x: float) -> float:
    """(e^x − 1 − x)/x², to the last digit below `_SMALL`."""
    return 1 / 2 + x * (
        1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720 + x * (1 / 5040 + x * (1 / 40320 + x / 362880)))))
    )


def _exact(x: float) -> float:
    if x < _SMALL:
        return x * x * _series(x)
    return math.expm1(x) - x if x < _LARGEST else math.inf


def _paper(x: float) -> float:
    return 0.5 * x * math.expm1(x) if x < _LARGEST else math.inf


def _overtaking_exact(d: float, debt: float) -> float:
    """In closed form: e^u (e^d − 1) − d = debt."""
    if d >= _LARGEST:
        return 0.0
    grown = math.expm1(d)
    rest = debt - _exact(d)
    return math.log1p(rest / grown) if rest > 0 else 0.0


def _overtaking_paper(d: float, debt: float) -> float:
    """By Newton's method from the right, where it cannot overshoot: the difference of losses is convex in u.

    The exact cost's u lies to the right, because the paper's loss is the steeper one.
    """
    if d >= _LARGEST or debt <= _paper(d):
        return 0.0
    u = min(_overtaking_exact(d, debt), _LARGEST - d)
    grown = math.expm1(d)
    for _ in range(_NEWTON_STEPS):
        e = math.exp(u)
        difference = 0.5 * (u * e * grown + d * math.expm1(u + d))
        slope = 0.5 * ((1 + u) * e * grown + d * math.exp(u + d))
        step = (difference - debt) / slope
        u -= step
        if step <= 1e-14 * u:
            break
    return max(u, 0.0)
