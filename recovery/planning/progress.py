"""Is a device server getting on?  Judged from its cursor and from what its process does, never from a beat.

A server without records to run is idle, whatever its worker does.  One that has records and does not move is
given up only on evidence: stopped by a signal; asleep for several times its own longest record; or, whatever
else it seems to do, not moving for `--hang-timeout`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from understudy.recovery.machine.activity import Activity
from understudy.recovery.planning.facts import FaultKind

SECOND = 1_000_000_000
STUCK_NS = SECOND // 10
"""Without progress for longer than this, the process is looked at."""
STOPPED_NS = SECOND // 4
"""How long a stopped process may have been stopped: who looks with a debugger lets it run again."""
SHORTEST_NS = SECOND
"""The least patience with a server that sleeps."""
TIMES = 5
"""Patience, as a multiple of what took longest before."""
REMEMBERED_STEPS = 16


@dataclass(frozen=True)
class Position:
    """What the shared control page says of a server."""

    cursor: int
    tail: int
    record: int
    step: int
    in_collective: bool

    @property
    def pending(self) -> bool:
        """Whether there is something to run."""
        return self.cursor != self.tail


@dataclass(frozen=True)
class Finding:
    """A server that does not get on.  `counts`: this was no guess, it tells against the record."""

    kind: FaultKind
    happened_ns: int
    evidence: str
    counts: bool


class Progress:
    """Follows one server of one session."""

    def __init__(self, activity: Activity, hang_timeout_ns: int) -> None:
        self._activity = activity
        self._hang_timeout_ns = hang_timeout_ns
        self._position: Position | None = None
        self._longest_ns = 0
        self._step_began_ns = 0
        self._steps: deque[int] = deque(maxlen=REMEMBERED_STEPS)
        self.since_ns = 0
        """Of the last progress."""

    @property
    def step_ns(self) -> int:
        """The longest of the last minibatches."""
        return max(self._steps, default=0)

    def stuck_ns(self, now_ns: int) -> int:
        """For how long it has had records to run and run none."""
        waiting = self._position is not None and self._position.pending
        return now_ns - self.since_ns if waiting else 0

    def moved_ns(self) -> int:
        """When it last moved, if there is something to run; 0 for an idle one."""
        return self.since_ns if self._position is not None and self._position.pending else 0

    def patience_ns(self, doublings: int) -> int:
        """How long a sleeping server is left alone."""
        longest = max(SHORTEST_NS, TIMES * self._longest_ns, TIMES * self.step_ns)
        return int(min(longest << min(doublings, 30), self._hang_timeout_ns))

    def look(self, position: Position, now_ns: int, doublings: int) -> Finding | None:
        """One look while it should be running; `doublings`: false alarms at this record before."""
        self._follow(position, now_ns)
        stuck = self.stuck_ns(now_ns)
        if stuck < STUCK_NS:
            return None
        self._activity.look(now_ns)
        if (stopped := self.stopped(now_ns)) is not None:
            return stopped
        if position.in_collective:
            return None
        asleep = now_ns - max(self.since_ns, self._activity.quiet_since_ns)
        if stuck >= self._hang_timeout_ns:
            evidence = f"record {position.record} has not ended for {stuck / SECOND:.0f} s (--hang-timeout)"
            return Finding(FaultKind.SERVER_HUNG, self.since_ns, evidence, counts=True)
        if asleep >= self.patience_ns(doublings) and not self._activity.stopped_since_ns:
            evidence = (
                f"asleep for {asleep / SECOND:.1f} s at record {position.record}, in no collective; "
                f"its longest record before took {self._longest_ns / SECOND:.2f} s"
            )
            return Finding(FaultKind.SERVER_HUNG, self.since_ns, evidence, counts=False)
        return None

    def look_aside(self, now_ns: int) -> Finding | None:
        """One look while a recovery steers it: it may stand still, but not be stopped."""
        self._position = None
        self._step_began_ns = 0
        self._activity.look(now_ns)
        return self.stopped(now_ns)

    def stopped(self, now_ns: int) -> Finding | None:
        """Whether a signal has stopped it for long enough."""
        since = self._activity.stopped_since_ns
        if not since or now_ns - since < STOPPED_NS:
            return None
        evidence = f"stopped by a signal for {(now_ns - since) / SECOND:.2f} s while records wait"
        return Finding(FaultKind.SERVER_STOPPED, self.since_ns or since, evidence, counts=False)

    def _follow(self, position: Position, now_ns: int) -> None:
        before, self._position = self._position, position
        if before is None or position.step != before.step:
            if before is not None and self._step_began_ns:
                self._steps.append(now_ns - self._step_began_ns)
                self._longest_ns = self._longest_ns * 9 // 10
            self._step_began_ns = now_ns
        left = before is not None and before.in_collective and not position.in_collective
        if before is not None and before.cursor == position.cursor and before.pending and not left:
            return  # a wait for peers that is over is progress: the record has just begun to take time
        if before is not None and before.pending and not before.in_collective:
            self._longest_ns = max(self._longest_ns, now_ns - self.since_ns)
        self.since_ns = now_ns
