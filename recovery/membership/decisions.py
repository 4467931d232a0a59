"""What leaders of a job decided: written before it is done, so that the next leader can finish it.

Decisions are numbered without gaps, one at a time: as long as one is undone there is no next.  Only who leads
can write.  Whoever carries one out asks each device's Fence first, so an order of a former leader that was
held up on its way is not followed any more.
"""

from __future__ import annotations

from dataclasses import dataclass

from recovery.control import pb
from recovery.membership.election import Deposed, Leadership
from recovery.membership.records import VERSION, BadRecord, read, written
from recovery.membership.store import ClusterStore, ClusterStoreError, Delete, Put, Unchanged

KEPT = 64
"""Decisions that are done and stay for people to read."""


class Undone(ClusterStoreError):
    """There is a decision to be carried out first: read it."""


@dataclass(frozen=True)
class Recorded:
    """A decision that is in the store, and its last change there."""

    decision: pb.Decision
    revision: int


class DecisionLog:
    """Of one job."""

    def __init__(self, store: ClusterStore, cluster: str, job: str) -> None:
        self._store = store
        self.leader_key = f"understudy/{cluster}/jobs/{job}/leader"
        self._prefix = f"understudy/{cluster}/jobs/{job}/decisions/"

    async def newest(self) -> Recorded | None:
        """What was decided last, done or not; a new leader begins with it.

        Raises Unreachable, and ClusterStoreError if it cannot be read: then nobody may decide.
        """
        listing = await self._store.list(self._prefix)
        if not listing.entries:
            return None
        last = listing.entries[-1]
        try:
            decision = read(last.value, pb.Decision)
            if self._key(decision.number) != last.key:
                raise BadRecord("its number is another")
        except BadRecord as problem:
            raise ClusterStoreError(f"the decision {last.key} cannot be read: {problem}") from problem
        return Recorded(decision, last.revision)

    async def decide(
        self, leadership: Leadership, leader: str, kind: str, plan: str, now_ms: int
    ) -> Recorded:
        """Write the next decision.  Only what this has answered, or `newest` tells, may be carried out.

        Raises Undone, Deposed, and Unreachable: then it may be there or come to be there; look at `newest`.
        """
        last = await self.newest()
        if last is not None and not last.decision.done:
            raise Undone(f"decision {last.decision.number} ({last.decision.kind}) is not done yet")
        number = last.decision.number + 1 if last is not None else 1
        decision = pb.Decision(
            version=VERSION, number=number, token=leadership.token, leader=leader, kind=kind, plan=plan,
            decided_ms=now_ms,
        )  # fmt: skip
        conditions = [leadership.holds, Unchanged(self._key(number), 0)]
        if last is not None:
            conditions.append(Unchanged(self._key(number - 1), last.revision))
        changes: list[Put | Delete] = [Put(self._key(number), written(decision))]
        if number > KEPT:
            changes.append(Delete(self._key(number - KEPT)))
        return await self._write(leadership, decision, conditions, changes)

    async def finish(self, leadership: Leadership, recorded: Recorded, outcome: str) -> Recorded:
        """It has been carried out; raises as `decide`."""
        done = pb.Decision()
        done.CopyFrom(recorded.decision)
        done.done, done.outcome = True, outcome
        key = self._key(done.number)
        conditions = [leadership.holds, Unchanged(key, recorded.revision)]
        return await self._write(leadership, done, conditions, [Put(key, written(done))])

    async def _write(
        self,
        leadership: Leadership,
        decision: pb.Decision,
        conditions: list[Unchanged],
        changes: list[Put | Delete],
    ) -> Recorded:
        revision = await self._store.transact(conditions, changes)
        if revision:
            return Recorded(decision, revision)
        leader = await self._store.get(leadership.key)
        if leader is None or leader.revision != leadership.token:
            raise Deposed(f"another leader has followed the one of token {leadership.token}")
        raise Undone(
            f"decision {decision.number} has changed meanwhile"
        )  # by a request of ours that was held up

    def _key(self, number: int) -> str:
        return f"{self._prefix}{number:016d}"


class Fence:
    """What a device remembers, so that it follows no order that comes after a newer one."""

    def __init__(self) -> None:
        self.newest = (0, 0)

    def admit(self, token: int, number: int) -> bool:
        """Whether an order may be followed: of the newest leader known, for its newest decision."""
        if (token, number) < self.newest:
            return False
        self.newest = (token, number)
        return True
