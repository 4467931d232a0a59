"""When a host counts as lost: its lease has ended, and its peers agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

ROUNDS = 2
"""Of peers that agree, one after the other: a single lost packet is no proof."""


class HostState(StrEnum):
    """What a proxyd thinks of a host."""

    ALIVE = "alive"
    SUSPECTED = "suspected"
    LOST = "lost"
    UNKNOWN = "unknown"
    """The store does not answer."""


@dataclass(frozen=True)
class Vote:
    """Whether a peer reaches the host; None: the peer could not be asked.  `why`, if not."""

    reaches: bool | None
    why: str = ""


@dataclass(frozen=True)
class Verdict:
    """A state and what it rests on; `rounds` in a row so far that spoke for a loss."""

    state: HostState
    why: str = ""
    rounds: int = 0


def judge(lease_ended: bool, votes: Mapping[str, Vote], rounds_before: int = 0) -> Verdict:
    """`votes` of the other registered hosts, by name.

    Lost: the lease has ended, and in ROUNDS rounds more than half of those who could be asked, and at least
    one, do not reach it.  Without lease but not lost: suspected.
    """
    if not lease_ended:
        return Verdict(HostState.ALIVE)
    asked = {name: vote for name, vote in votes.items() if vote.reaches is not None}
    if not asked:
        whys = sorted({vote.why for vote in votes.values() if vote.why})
        return Verdict(HostState.SUSPECTED, "nobody can be asked for it" + (f": {whys[0]}" if whys else ""))
    against = sorted(name for name, vote in asked.items() if not vote.reaches)
    count = f"{len(against)} of {len(asked)}"
    if 2 * len(against) <= len(asked):
        those = ", ".join(sorted(set(asked) - set(against)))
        return Verdict(HostState.SUSPECTED, f"its lease has ended, but {those} can reach it")
    rounds = min(rounds_before + 1, ROUNDS)
    told = f"its lease has ended, and {count} that could be asked do not reach it ({', '.join(against)})"
    return Verdict(HostState.LOST if rounds >= ROUNDS else HostState.SUSPECTED, told, rounds)
