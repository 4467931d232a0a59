"""Who needs which snapshots of a job's ranks, whatever the floor is; servers see all of them together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from understudy.recovery.state.jobs import Session


class SnapshotLeases:
    """The leases on the snapshots of one job."""

    def __init__(self) -> None:
        self._held: dict[str, frozenset[int]] = {}

    def hold(self, who: str, serials: Iterable[int], sessions: Sequence[Session]) -> None:
        """From now on `who` needs these and no others, of all these ranks."""
        self._held[who] = frozenset(serials)
        together = sorted(frozenset[int]().union(*self._held.values()))
        for session in sessions:
            if session.active:
                session.log.lease_snapshots(together)
