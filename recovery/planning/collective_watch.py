"""Which collective will never end?  One that every member has begun while nobody does anything about it.

A rank that waits for a peer whose program has not come to the collective yet waits for nothing unusual,
however long it takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from understudy.recovery.planning.progress import SECOND, SHORTEST_NS, TIMES

Uid = tuple[int, int]

BUSY_DEVICE_NS = 10 * SECOND
"""The least patience where a processor tells nothing of a device's work."""


@dataclass(frozen=True)
class Member:
    """What the control page of a rank says: the collective it waits for, and how far each has been begun."""

    waits_for: tuple[Uid, int] | None
    started: Mapping[Uid, tuple[int, int]]
    """Communicator -> (collectives begun, members)."""
    quiet_since_ns: int
    stuck_outside: bool
    """It has records to run, runs none, and is in no collective: its own fault, if it is one."""


@dataclass
class Arrival:
    """Those who have begun one collective, looked at together."""

    count: int = 0
    stuck_outside: bool = False
    """Any of them."""
    quiet_since_ns: int = 0
    """All of them."""

    def add(self, member: Member) -> None:
        self.count += 1
        self.stuck_outside |= member.stuck_outside
        self.quiet_since_ns = max(self.quiet_since_ns, member.quiet_since_ns)


@dataclass(frozen=True)
class Hung:
    """A collective that was given up."""

    rank: int
    since_ns: int
    evidence: str
    counts: bool
    """Whether this was no guess: it tells against the record."""


class CollectiveWatch:
    """Follows the collectives of one job."""

    def __init__(self, hang_timeout_ns: int, shortest_ns: int = SHORTEST_NS) -> None:
        self._hang_timeout_ns = hang_timeout_ns
        self._shortest_ns = shortest_ns
        self._complete: dict[int, tuple[Uid, int, int]] = {}
        self._longest_ns = 0
        self._alarms: dict[tuple[Uid, int], int] = {}

    @property
    def waiting(self) -> bool:
        """Whether a collective that all have begun was still under way."""
        return bool(self._complete)

    def patience_ns(self, uid: Uid, sequence: int) -> int:
        """How long a collective may take once its last member has come; each alarm it caused doubles that."""
        longest = max(self._shortest_ns, TIMES * self._longest_ns)
        return int(min(longest << min(self._alarms.get((uid, sequence), 0), 30), self._hang_timeout_ns))

    def look(self, members: Mapping[int, Member], now_ns: int) -> Hung | None:
        """One look at all ranks."""
        for rank in list(self._complete):
            uid, sequence, since_ns = self._complete[rank]
            if rank not in members or members[rank].waits_for != (uid, sequence):
                self._longest_ns = max(self._longest_ns * 99 // 100, now_ns - since_ns)
                del self._complete[rank]
        begun = arrivals(members.values())
        for rank, member in members.items():
            if member.waits_for is None:
                continue
            uid, sequence = member.waits_for
            arrived = begun[uid, sequence]
            if arrived.count < member.started.get(uid, (0, 1 << 30))[1]:
                continue
            since_ns = self._complete.setdefault(rank, (uid, sequence, now_ns))[2]
            if arrived.stuck_outside:
                continue
            quiet_ns = now_ns - max(since_ns, arrived.quiet_since_ns)
            overdue = now_ns - since_ns >= self._hang_timeout_ns
            if overdue or quiet_ns >= self.patience_ns(uid, sequence):
                evidence = (
                    f"all {arrived.count} members have begun collective {sequence}, and nothing has moved "
                    f"for {quiet_ns / SECOND:.1f} s; the longest before took "
                    f"{self._longest_ns / SECOND:.2f} s"
                )
                alarms = self._alarms.get((uid, sequence), 0)
                self._alarms = {(uid, sequence): alarms + 1}
                self._complete.clear()
                return Hung(rank, since_ns, evidence, counts=overdue)
        return None

    def forget(self) -> None:
        """A recovery has begun: nobody waits any more."""
        self._complete.clear()


def arrivals(members: Collection[Member]) -> dict[tuple[Uid, int], Arrival]:
    """For each collective that somebody waits for: who has come to it, or is beyond it.

    Each member is looked at once for each communicator that it has, and not once for each that waits.
    """
    waited_for: defaultdict[Uid, dict[int, Arrival]] = defaultdict(dict)
    for member in members:
        if member.waits_for is not None:
            uid, sequence = member.waits_for
            waited_for[uid].setdefault(sequence, Arrival())
    for member in members:
        for uid, (count, _) in member.started.items():
            for sequence, arrival in waited_for.get(uid, {}).items():
                if count >= sequence:
                    arrival.add(member)
    return {(uid, sequence): one for uid, of in waited_for.items() for sequence, one in of.items()}
