"""What has been noticed in a job and is not recovered from yet."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import structlog

from understudy.protos import control_pb2 as pb
from understudy.recovery.drills.fault_table import BY_NUMBER
from understudy.recovery.planning.facts import ECHOES, SERVERS_SOUND, WISHES, FaultFacts, FaultKind
from understudy.recovery.state.failure_counts import FailureCounts
from understudy.recovery.state.incidents import CALLS, Fault, causes_of
from understudy.recovery.state.jobs import Job, Session

log = structlog.get_logger()

ENDED = "its process ended"
"""Evidence of a device server's death; what it could still say of the reason goes behind it."""


def last_words(evidence: str) -> str:
    """What a server still said of its end, behind a colon; empty if it could not, or hung."""
    _, colon, words = evidence.partition(f"{ENDED}: ")
    return f": {words}" if colon else ""


class Noticed:
    """The faults and orders of one job, as they came, and how far replay has to get because of them."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._failures = FailureCounts()
        self.faults: list[Fault] = []
        self.trusted: Mapping[int, int] = {}
        """Newest commit of each rank at which its state was right, while corrupted state is repaired."""
        self._reach: dict[int, int] = {}
        """Records that each rank has to have executed before the recovery is over."""

    def trust(self, commits: Mapping[int, int]) -> None:
        """State was right up to these, and no further: rank -> commit."""
        self.trusted = dict(commits)

    def add(
        self, session: Session, kind: FaultKind, happened: int, noticed: int, evidence: str, *,
        message: str, record_index: int, counts: bool,
    ) -> None:  # fmt: skip
        """`happened`, `noticed`: CLOCK_MONOTONIC nanoseconds; `record_index` < 0: where its server is.

        `counts`: whether it tells against the record where it came up.
        """
        index = session.log.cursor_index if record_index < 0 else record_index
        step, call = session.log.step, session.log.call
        injected = self._injected(session, kind)
        if injected is not None:
            happened, step, call = injected
        drill = injected is not None and kind not in CALLS  # an injected error is as good as a real one
        fault = Fault(
            kind, session.rank, step, call, session.phase, index, message, happened, noticed, drill, evidence
        )
        log.warning(
            "fault", job=self._job.name, kind=kind.value, rank=fault.rank, step=step, call=call, record=index,
            phase=fault.phase.value, drill=drill, evidence=evidence,
        )  # fmt: skip
        if counts and not drill:
            self._failures.add(fault, session.log.commit_count, session.on_gpu)
            session.block_until_commit = self._failures.commit_to_pass(fault) if session.on_gpu else 0
        self.faults.append(fault)
        if kind in CALLS:  # that record has to be passed this time
            self._reach[fault.rank] = max(self._reach.get(fault.rank, 0), index + 1)

    def _injected(self, session: Session, kind: FaultKind) -> tuple[int, int, int] | None:
        """When and where a drill caused this: (CLOCK_MONOTONIC ns, step, call), or None if none did.

        What other ranks are told of a collective may have been done to one of its other members.
        """
        if kind is FaultKind.SERVER_DIED and session.killed_ns:
            at_ns, session.killed_ns = session.killed_ns, 0
            session.drills_seen.update(slot for slot, mark in enumerate(session.log.drills()) if mark[3])
            return at_ns, session.log.step, session.log.call
        for member in [session, *(self._job.active_sessions() if kind in ECHOES else ())]:
            fired = [
                (at_ns, step or member.log.step, call or member.log.call, slot)
                for slot, (number, step, call, state, at_ns, _) in enumerate(member.log.drills())
                if state and slot not in member.drills_seen and BY_NUMBER[number].noticed_as is kind
            ]
            if fired:
                at_ns, step, call, slot = max(fired)
                member.drills_seen.add(slot)
                return at_ns, step, call
        return None

    @property
    def nothing_broke(self) -> bool:
        """Whether numbers are wrong, or somebody ordered something, and that is all."""
        return bool(self.faults) and all(fault.kind in SERVERS_SOUND for fault in self.faults)

    @property
    def only_wishes(self) -> bool:
        """Whether somebody ordered something, and that is all."""
        return bool(self.faults) and all(fault.kind in WISHES for fault in self.faults)

    @property
    def corruption(self) -> pb.JournaledCorruption | None:
        """The corruption that is being repaired: nobody else could tell any more which commits are right."""
        found = [fault for fault in self.faults if fault.kind is FaultKind.SILENT_CORRUPTION]
        if not found:
            return None
        return pb.JournaledCorruption(rank=found[0].rank, message=found[0].message, trusted=self.trusted)

    def facts(self) -> FaultFacts:
        """For the planner; of a validation if nothing has been noticed."""
        if not self.faults:
            everybody = tuple(session.rank for session in self._job.active_sessions())
            return FaultFacts(FaultKind.VALIDATION, everybody, sound=everybody)
        causes = causes_of(self.faults)
        worst = max(causes, key=self._failures.of)
        attempts = self._failures.of(worst)
        message = worst.message
        if not message and attempts > 1:
            message = (
                f"the device server of rank {worst.rank} died {attempts} times, the last time at record "
                f"{worst.record_index}{last_words(worst.evidence)}"
            )
        ranks = tuple(sorted({fault.rank for fault in self.faults}))
        broken = {fault.rank for fault in self.faults if fault.kind not in WISHES}
        sound = tuple(rank for rank in ranks if rank not in broken)
        return FaultFacts(causes[0].kind, ranks, worst.phase, attempts, message, self.trusted, sound)

    def reach_as_far_as_now(self) -> None:
        """Replay has to bring each rank back to where it is."""
        for session in self._job.active_sessions():
            self._reach[session.rank] = max(self._reach.get(session.rank, 0), session.log.cursor_index)

    def is_short_of_its_goal(self, session: Session) -> bool:
        """Whether replay has not brought a rank to where it was, nor past the call that failed there."""
        return session.log.cursor_index < self._reach.get(session.rank, 0)

    def echoes_do_not_count(self, faults: Collection[Fault], causes: Collection[Fault]) -> None:
        """They came of other ranks' failures, and tell nothing against the records where they came up."""
        ranks = {cause.rank for cause in causes}
        for fault in faults:
            if fault.rank not in ranks:
                self._failures.forget(fault)

    def keep(self, later: list[Fault]) -> None:
        """Keeps only those faults that are yet to be recovered from."""
        self.faults, self.trusted = later, {}
        self._reach = {fault.rank: fault.record_index + 1 for fault in later if fault.kind in CALLS}
