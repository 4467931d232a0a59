"""Faults of a run: what is to happen, to whom, where; and which of the ways can have it happen to them.

The same fault is another event in each way of running. What fails is a rank's *device*: natively that takes
the process with it, whose driver state is in it; under the proxy it is the device server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from understudy.recovery.drills.fault_table import FAULTS


class Native(Enum):
    """What a process of a native run does to itself."""

    KILL = "is killed (SIGKILL)"
    STOP = "is stopped (SIGSTOP), and a collective with it never ends"
    ERROR = "raises what CUDA raises behind a device-side assertion"
    LEAVE = "is killed, and nobody takes its place until a rank comes"
    JOIN = "is killed, as the launcher does to take in a rank"
    STORAGE_ERROR = "cannot write its next checkpoint: EIO"
    STORAGE_LATE = "waits two seconds longer until its next checkpoint is durable"


@dataclass(frozen=True)
class Kind:
    """`drill`: of `recoveryctl drill`; None where that way cannot have it."""

    native: Native | None
    drill: str | None


KINDS: Mapping[str, Kind] = {
    "kill": Kind(Native.KILL, "kill-server"),
    "hang": Kind(Native.STOP, "stop-server"),
    "error": Kind(Native.ERROR, "sticky-error"),
    "lose-rank": Kind(Native.LEAVE, None),
    "rank-returns": Kind(Native.JOIN, None),
    "storage-error": Kind(Native.STORAGE_ERROR, None),
    "storage-late": Kind(Native.STORAGE_LATE, None),
    **{row.name: Kind(None, row.name) for row in FAULTS},
}
"""By the name that a campaign's file has; those of drills have no counterpart in a native process."""


@dataclass(frozen=True, order=True)
class Fault:
    """`step`: the one it happens in, from 1. `place`: how far into it, 0 (before its first call) to 1."""

    step: int
    rank: int
    kind: str
    place: float = 0.0

    @property
    def native(self) -> Native | None:
        return KINDS[self.kind].native

    def drill(self, calls: int) -> str | None:
        """For `proxyrun --drill`, in a step of so many calls."""
        name = KINDS[self.kind].drill
        if name is None:
            return None
        return (
            f"{name} rank={self.rank} step={self.step} call={max(1, min(calls, round(self.place * calls)))}"
        )

    def __str__(self) -> str:
        return f"{self.kind} of rank {self.rank} in step {self.step} at {self.place:.2f}"
