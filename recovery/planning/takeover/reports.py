"""What the host of a rank reports of it to whoever takes its job over, there or from another host."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OpenFault:
    """At which a device server stands: it goes on once somebody has done something about it.

    `kind` and `record_index` are as in FaultReport.
    """

    kind: str
    message: str = ""
    record_index: int = 0


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank whose program goes on.

    `server_runs`: its device server does.  `holds_state`: all memory of the rank is in it; if not, it was
    being prepared.  `parked`: whoever led the job had it stand still.  `in_hand`: who takes the job over is
    preparing it, as it was not away itself.  `fault_in_hand`: likewise, it has been told of that very fault.
    """

    rank: int
    server_runs: bool = True
    holds_state: bool = True
    parked: bool = False
    fault: OpenFault | None = None
    in_hand: bool = False
    fault_in_hand: bool = False
