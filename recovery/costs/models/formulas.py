"""Equations 1 to 8 of paper 001, §5: GPU time that failures and checkpoints waste.

In all of them N is the number of GPUs, f failures per GPU and second, o seconds that one checkpoint stops
training for, r seconds of a recovery whatever is redone, m seconds of a minibatch, c checkpoints per second,
t seconds of *useful* training.  Each takes floats, or NumPy arrays of them.

The paper writes W for two things: GPU-seconds wasted by N GPUs in t (eqs. 1, 4, 7, 8), and, in eq. 6, seconds
wasted per GPU and useful second, which eq. 5 calls w*.  Here the former are `…_work`, the latter `…_waste`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

Real = TypeVar("Real", float, "NDArray[float64]")


def periodic_work(c: Real, N: Real, f: Real, o: Real, r: Real, t: Real) -> Real:
    """GPU-seconds lost with c checkpoints per second (eq. 1)."""
    return N * t * periodic_waste(c, N, f, o, r)


def periodic_waste(c: Real, N: Real, f: Real, o: Real, r: Real) -> Real:
    """Seconds lost per GPU and useful second with c checkpoints per second: eq. 1 over N t.

    Checkpoints, fixed cost of recoveries, and half an interval that is trained again after each failure.
    """
    return c * o + N * f * r + N * f / (2 * c)


def marginal_work(c: Real, N: Real, f: Real, o: Real, t: Real) -> Real:
    """dW/dc, GPU-seconds per checkpoint and second (eq. 2); zero at the optimum."""
    return N * t * (o - N * f / (2 * c**2))


def optimal_frequency(N: Real, f: float, o: float) -> Real:
    """c*, checkpoints per second (eq. 3)."""
    return (N * f / (2 * o)) ** 0.5


def least_periodic_work(N: Real, f: Real, o: Real, r: Real, t: Real) -> Real:
    """W*, GPU-seconds lost at c* (eq. 4)."""
    return N * t * least_periodic_waste(N, f, o, r)


def least_periodic_waste(N: Real, f: Real, o: Real, r: Real) -> Real:
    """w*, seconds lost per GPU and useful second at c* (eq. 5)."""
    return 2 * (N * f * o / 2) ** 0.5 + N * f * r


def wasted_fraction(w: Real) -> Real:
    """w_f: of all the time of a GPU, the part that is wasted (eq. 6, where W is printed and w meant)."""
    return w / (1 + w)


def user_level_waste(N: Real, f: Real, o: Real, o_jit: Real, r: Real, m: Real) -> Real:
    """The waste of user-level just-in-time checkpoints, seconds per GPU and useful second: eq. 7 over N t.

    o_jit: seconds per useful second, hence Table 4's overhead over its minibatch.  The paper's f o is what
    *one* GPU's failures cost one GPU; as all wait for that checkpoint it should be N f o, and the recoveries
    of Table 4 hold checkpoint and restore: see `user_level_waste_when_all_wait`.
    """
    return f * o + o_jit + N * f * r + N * f * m / 2


def user_level_waste_when_all_wait(N: Real, f: Real, o: Real, o_jit: Real, r: Real, m: Real) -> Real:
    """Eq. 7 over N t with all N GPUs waiting for the checkpoint that follows a failure."""
    return N * f * o + o_jit + N * f * r + N * f * m / 2


def transparent_waste(N: Real, f: Real, o_jit: Real, m: Real) -> Real:
    """The waste of transparent recovery from transient errors, per GPU and useful second: eq. 8 over N t."""
    return o_jit + N * f * m / 2


def transparent_waste_with_recovery(N: Real, f: Real, o_jit: Real, m: Real, recovery: Real) -> Real:
    """Eq. 8 over N t with the seconds of a recovery that the paper measured (Table 5) and leaves out."""
    return o_jit + N * f * (recovery + m / 2)


def monthly_dollars_of_redone_work(N: float, failures: float, interval_hours: float, price: float) -> float:
    """§5.1: half an interval of N GPUs after each of a month's failures, at `price` dollars per GPU-hour."""
    return N * failures * interval_hours / 2 * price
