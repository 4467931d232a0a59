"""Which minibatches of a job are executed twice, and what came of it (paper 001, section 4.1)."""

from __future__ import annotations

import time
from collections.abc import Sequence

import structlog

from understudy.recovery.history.events import validation_failed
from understudy.recovery.state.jobs import Job, Session

log = structlog.get_logger()

FIRST = 5
"""The first minibatch to be validated: by then shapes are learnt and optimizers have their state."""
MOST_TIME, PASSES = 0.01, 2
"""Share of a lone rank's time that is for copying its state: it takes a snapshot, and goes back to it."""
AHEAD = 2
"""Minibatches between the order and the step it names: servers must not have begun it."""


class ValidationSchedule:
    """Orders the validations of one job, every `every` minibatches (0: none), and collects their results.

    Once one of them showed that replay gives other bits, it orders no more: to go back would do damage.
    """

    def __init__(
        self, job: Job, every: int, optimizer_preimages: bool = True, snapshots: bool = True
    ) -> None:
        """`snapshots`: whether they stay in host memory, where a rank alone goes back to them."""
        self._job = job
        self._every = every
        self._optimizer_preimages = optimizer_preimages
        self._snapshots = snapshots
        self._step = FIRST if every else 0
        self._again_s = 0.0
        """Until then a rank alone is not validated again."""
        self._failed: dict[int, int] = {}

    @property
    def step(self) -> int:
        """The next minibatch to be executed twice; 0: none."""
        return self._step

    def expect(self, step: int) -> None:
        """As another host has it, which leads the job."""
        self._step = step

    def arm(self, session: Session) -> None:
        """A session opens: its server must know of the next validation before it comes there."""
        session.log.validate_step = self._step if session.world > 1 or self._snapshots else 0

    def go_on(self, sessions: Sequence[Session]) -> None:
        """Sessions that a predecessor has armed."""
        if self._every and sessions:
            self._step = max(self._step, *(session.log.validate_step for session in sessions))
            self._failed = {session.rank: session.log.validations_failed for session in sessions}

    def look(self, sessions: Sequence[Session]) -> None:
        """Collect results; order the next validation when the last one is over everywhere."""
        for session in sessions:
            session.not_validated = self._never(session)
        if not self._every or not sessions or len(sessions) < sessions[0].world:
            return
        for session in sessions:
            self.collect(session)
        if self._again_s:
            return self._order_again(sessions)
        if not self._step:
            return
        done = [session for session in sessions if session.log.validated_step >= self._step]
        if len(done) < len(sessions) and any(session.log.step <= self._step for session in sessions):
            return
        if len(done) == len(sessions):
            self._job.validations += 1
        alone = sessions[0].world == 1
        if alone and done:
            seconds = max((kept.seconds for kept in sessions[0].log.snapshots()), default=0.0)
            self._again_s = time.monotonic() + PASSES * seconds / MOST_TIME
            self._step = 0
        else:  # a rank alone leaves a step out where a snapshot of another one is awaited: it costs nothing
            self._order(sessions, 1 if alone else self._every)

    def _order_again(self, sessions: Sequence[Session]) -> None:
        if time.monotonic() >= self._again_s:
            self._again_s = 0.0
            self._order(sessions, self._every)

    def _order(self, sessions: Sequence[Session], every: int) -> None:
        soonest = max(session.log.step for session in sessions) + AHEAD
        self._step = 0 if self._job.not_replayable else -(-soonest // every) * every
        for session in sessions:
            self.arm(session)

    def _never(self, session: Session) -> str:
        """What of this rank is never executed twice, and why; or nothing."""
        if not self._every:
            return "no minibatch (--validate-every 0)"
        if session.world > 1 and not self._optimizer_preimages:
            return "no optimizer step, as no pre-images are kept in it (--optimizer-preimages off)"
        if session.world > 1 and session.log.final_steps:
            return f"no optimizer step of rank {session.rank}, whose device has no memory for pre-images"
        if session.world == 1 and (not self._snapshots or session.log.snapshot_suspended):
            return f"rank {session.rank}, which is alone and has no snapshots in host memory to go back to"
        return ""

    def collect(self, session: Session) -> None:
        """Tell of a difference that its server has found; also of a session that ends."""
        failed = session.log.validations_failed
        if failed <= self._failed.get(session.rank, 0):
            return
        self._failed[session.rank] = failed
        message = f"rank {session.rank}, step {session.log.validated_step}: {session.log.validation_message}"
        log.error("the log is not replayable", job=self._job.name, rank=session.rank, difference=message)
        found = validation_failed(self._job.name, session.rank, session.log.validated_step, message)
        self._job.history.add(found)
        self._job.distrust_replay(message)
