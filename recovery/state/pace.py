"""How fast a rank trains, by looking at how far it has come."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

REMEMBERED = 32


@dataclass
class StepClock:
    """Times the steps of one session.  Several minibatches may end between two looks."""

    _step: int = -1
    _began_ns: int = 0
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def look(self, step: int, now_ns: int) -> None:
        """`step`: the minibatch that it is in; one that is earlier than before was gone back to."""
        if step == self._step:
            return
        if 0 <= self._step < step:
            self._seconds.append((now_ns - self._began_ns) / 1e9 / (step - self._step))
        self._step, self._began_ns = step, now_ns

    @property
    def step_s(self) -> float:
        """The seconds of a minibatch, the median of the last ones; 0: none has ended yet."""
        return statistics.median(list(self._seconds)[1:] or self._seconds) if self._seconds else 0.0

    def age_s(self, now_ns: int) -> float:
        """For how long it has been in its minibatch; 0: nobody has looked."""
        return (now_ns - self._began_ns) / 1e9 if self._step >= 0 else 0.0
