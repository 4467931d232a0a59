"""Training between two failures: how far it comes, and which checkpoint counts by then."""

from __future__ import annotations

import math
from dataclasses import dataclass

_ROUNDING = 1e-9
"""Of an interval: a position that is so near to a checkpoint's is there."""


@dataclass(frozen=True)
class Pace:
    """Training that takes 1 + `overhead` seconds per useful one, with checkpoints at multiples of `every`.

    `every` in useful seconds, infinite for none; each stops training for `stop` seconds, and counts `durable`
    seconds after that.  One that is under way at a failure is lost.
    """

    overhead: float = 0.0
    every: float = math.inf
    stop: float = 0.0
    durable: float = 0.0

    def advance(self, useful: float, kept: float, seconds: float) -> tuple[float, float]:
        """Useful seconds after so many of the clock, and those of the newest checkpoint that counts."""
        slow = 1 + self.overhead
        if self.every == math.inf:
            return useful + seconds / slow, kept
        following = math.floor(useful / self.every + _ROUNDING) + 1
        until_first = (following * self.every - useful) * slow
        if seconds < until_first:
            return useful + seconds / slow, kept
        cycle = self.stop + self.every * slow
        since_first = seconds - until_first
        whole = math.floor(since_first / cycle)
        come_to = (following + whole) * self.every + max(0.0, since_first - whole * cycle - self.stop) / slow
        counting = math.floor((since_first - self.stop - self.durable) / cycle)
        if counting >= 0:
            kept = max(kept, (following + counting) * self.every)
        return come_to, kept
