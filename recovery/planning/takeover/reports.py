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
    """One rank.

    `server_runs`: its device server does.  `holds_state`: all memory of the rank is in it; if not, it was
    being prepared.  `parked`: whoever led the job had it stand still.  `in_hand`: who takes the job over is
    preparing it, as it was not away itself.  `fault_in_hand`: likewise, it has been told of that very fault.
    `half_prepared`: a server was being prepared, and could not be used any more.  `newest_generation`: of
    which its servers have heard.  `active`: its program goes on.
    """

    rank: int
    server_runs: bool = True
    holds_state: bool = True
    parked: bool = False
    fault: OpenFault | None = None
    in_hand: bool = False
    fault_in_hand: bool = False
    half_prepared: bool = False
    newest_generation: int = 0
    active: bool = True

    @property
    def left_unfinished(self) -> bool:
        """Whether nobody gets its server to go on: a recovery was under way."""
        return self.server_runs and (self.parked or not (self.holds_state or self.in_hand))

    @property
    def cut_short(self) -> bool:
        """Whether a recovery of it was under way, and has to be done again."""
        return self.active and (self.left_unfinished or self.half_prepared)
