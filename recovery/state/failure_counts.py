"""How often ranks have failed in one way without getting on, so that no recovery goes on for ever."""

from __future__ import annotations

from dataclasses import dataclass

from understudy.recovery.planning.facts import FaultKind
from understudy.recovery.state.incidents import Fault


@dataclass(frozen=True)
class _Count:
    record: int
    commit: int
    """The newest one that the rank has ever reached."""
    times: int


class FailureCounts:
    """Counts the failures of one job, by rank and kind of fault."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, FaultKind], _Count] = {}

    def add(self, fault: Fault, commit: int, asynchronous: bool) -> None:
        """One more, of a rank whose newest commit is `commit`.

        It is the same failure as the one before if it came at the same record; where errors are asynchronous,
        if the rank had not reached a commit since: they come to light at whatever record looks next.
        """
        before = self._counts.get((fault.rank, fault.kind))
        same = before is not None and (
            commit <= before.commit if asynchronous else fault.record_index == before.record
        )
        self._counts[fault.rank, fault.kind] = _Count(
            fault.record_index,
            max(commit, before.commit) if before is not None else commit,
            before.times + 1 if before is not None and same else 1,
        )

    def of(self, fault: Fault) -> int:
        """How often it has come by now."""
        found = self._counts.get((fault.rank, fault.kind))
        return found.times if found and found.record == fault.record_index and not fault.drill else 1

    def commit_to_pass(self, fault: Fault) -> int:
        """The one that a rank has failed to reach more than once in this way; 0: it has failed once."""
        found = self._counts.get((fault.rank, fault.kind))
        return found.commit + 1 if found and found.times > 1 else 0

    def forget(self, fault: Fault) -> None:
        """It was the echo of another one."""
        self._counts.pop((fault.rank, fault.kind), None)
