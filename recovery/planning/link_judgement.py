"""Which hosts are cut off from the data network, by who reaches whom over it; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

CARRIER_DOWN = "down"


@dataclass(frozen=True)
class Seen:
    """What one host tells of the data network."""

    reaches: Mapping[str, bool | None] = field(default_factory=dict)
    """Other hosts; None: it cannot tell."""
    carrier: str = ""
    """Of its own interface: "up", "down"; empty: it cannot tell."""


Matrix = Mapping[str, Seen]
"""Hosts that answered, by name."""


def judge_links(matrix: Matrix) -> frozenset[str]:
    """Those that are cut off, so that the others reach each other without them.

    A host whose interface has no carrier is, if anybody misses it.  So is one that more than half of those
    who can tell miss, while two of the others reach each other; of several the one missed by the largest
    share goes first, so of two halves that of the last name goes.

    Where two hosts are left that do not reach each other, nobody can tell whose fault it is: if one could
    not even be asked, it is that one; if both tried and failed, the one whose name comes last.  All who
    look at the same matrix agree, and a rank that moves needlessly costs seconds, two that wait for each
    other the job.  Where nobody reaches anybody the network is at fault, and no host.
    """
    left = sorted(set(matrix).union(*(seen.reaches for seen in matrix.values())))
    cut = {one for one in left if _carrier(matrix, one) and any(_fails(matrix, one, other) for other in left)}
    while rest := [one for one in left if one not in cut]:
        if len(rest) == 2:
            first, last = rest
            if _fails(matrix, *rest) and not (_reaches(matrix, first, last) or _reaches(matrix, last, first)):
                cut.add(last if last not in matrix or first in matrix else first)
            break
        shares = [(share, one) for one in rest if (share := _missed(matrix, one, rest)) > 0.5]
        if not shares:
            break
        cut.add(max(shares)[1])
    return frozenset(cut)


def _carrier(matrix: Matrix, host: str) -> bool:
    return host in matrix and matrix[host].carrier == CARRIER_DOWN


def _reaches(matrix: Matrix, one: str, other: str) -> bool | None:
    return matrix[one].reaches.get(other) if one in matrix else None


def _both(matrix: Matrix, one: str, other: str) -> tuple[bool | None, bool | None]:
    return _reaches(matrix, one, other), _reaches(matrix, other, one)


def _fails(matrix: Matrix, one: str, other: str) -> bool:
    """In either direction: collectives need both."""
    return one != other and False in _both(matrix, one, other)


def _missed(matrix: Matrix, host: str, rest: list[str]) -> float:
    """The share of those who can tell; 0 if no two of the others reach each other."""
    others = [one for one in rest if one != host]
    known = [one for one in others if set(_both(matrix, one, host)) != {None}]
    sound = any(
        True in _both(matrix, one, other) and not _fails(matrix, one, other)
        for one in others for other in others if one < other
    )  # fmt: skip
    if not known or not sound:
        return 0.0
    return sum(_fails(matrix, one, host) for one in known) / len(known)
