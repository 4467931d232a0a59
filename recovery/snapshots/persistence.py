"""proxyd's part of persistent snapshots: which sets go to storage, and when a step is complete on all ranks.

A set of snapshots in host memory that counts (recovery/upkeep/snapshots.py) is offered here.  If one is due
it is leased, so that device servers keep its memory, and the job's writer copies it into stores.  It counts
as durable when every rank's part is; then older ones may go.  Trouble with storage is told in `recoveryctl
status` and never holds up training.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from understudy import replay
from understudy.recovery.base.timing import TIMING, Timing
from understudy.recovery.host.evidence import facts_of
from understudy.recovery.snapshots.log.log_keeping import LogKeeping
from understudy.recovery.snapshots.remote.mirroring import CompleteSet, Mirroring
from understudy.recovery.snapshots.settings import PersistenceSettings, Writing
from understudy.recovery.snapshots.tuning.pacing import Pacing
from understudy.recovery.snapshots.writing.part_writer import PartsWith, PartWriter, here_alone
from understudy.recovery.snapshots.writing.request import Discard, Release, Written
from understudy.recovery.state.durable import Durable
from understudy.recovery.state.jobs import Job, Session
from understudy.recovery.state.span import Stored

log = structlog.get_logger()

RETRY_S = 10.0
"""After trouble with storage."""
SLOW_S = 60.0
"""A set that is under way for so long is told of; a disk may hang for ever ..."""
SLOW_FACTOR, SLOW_LEAST_S = 10.0, 5.0
"""... or, once one became durable, for so many times as long as that took, but not for less than this."""
HOLDER = "storage"
MISSED_S = 5.0
"""After so long an ordered set that its ranks have passed is taken for one that does not come."""
WRITER_THREADS = Writing.threads
"""Per snapshot, unless proxyd was told otherwise."""


@dataclass
class Set:
    """A snapshot of all ranks on its way to storage."""

    serial: int
    run: str
    sessions: Sequence[Session]
    commits: Mapping[int, replay.Commit]
    """By rank."""
    step: int
    begun_s: float
    missing: set[int] = field(default_factory=set)
    failed: str = ""
    gone: bool = False
    """From host memory, before it was written."""
    bytes: int = 0
    in_flight: int = 1
    """How many were under way at once, at most."""
    on_other_hosts: bool = False
    """Whether parts of it were written on other hosts."""

    @property
    def is_within_reach(self) -> bool:
        """Whether it can be read here, and brought back to its ranks."""
        return not self.on_other_hosts and not any(session.host for session in self.sessions)


class Persistence:
    """Takes the snapshots of one job to storage."""

    def __init__(
        self, job: Job, settings: PersistenceSettings, note: Callable[[], None] = lambda: None,
        reduced: str = "", timing: Timing = TIMING, parts: PartsWith = here_alone,
    ) -> None:  # fmt: skip
        """`note` writes down what is durable; `reduced`: what was asked for and is not possible, if so."""
        self._note, self._reduced = note, reduced
        self._job = job
        self._settings = settings
        self._sets: dict[int, Set] = {}
        self._due_s = 0.0
        self._run = ""
        self._announced: dict[int, int | None] = {}
        """Serials that are to be taken, and after which step; None: of any."""
        self._looked_s = self._announced_s = 0.0
        self._pacing: Pacing | None = None
        """Chooses how often, if that was not said."""
        self._complete = 0
        """Newest serial of this run that is durable on all ranks."""
        self._took_s = math.inf
        """What that took."""
        self.writer = PartWriter(job.name, settings, self.take_now)
        self._parts = parts(self.writer, self.take_now)
        mirror = settings.mirror
        self.mirroring = (
            Mirroring(job, settings, mirror, self._release, timing) if mirror is not None else None
        )
        """To the second tier, if there is one."""
        self.log_keeping = LogKeeping(job, settings, run_name) if settings.keeps_log else None
        """Of the log behind the sets, if that goes to storage too."""

    @property
    def stays_in_memory(self) -> bool:
        """Whether a set does once it is durable."""
        return self._settings.stays_in_memory

    def due(self, sessions: Sequence[Session], now: float, pressed: bool = False) -> bool:
        """Whether the next set is to be persisted, where time decides.

        `now`: seconds.  `pressed`: logs are filling up, so it need not be due.
        """
        self._begin_run(sessions)
        self._complain_of_slowness(now)
        if len(self._sets) >= self._settings.in_flight:
            return False
        by_time = not self._settings.every_steps and self._pacing is None
        return pressed or (by_time and now >= self._due_s)

    def next_step(self, after: int, sessions: Sequence[Session], now: float) -> int | None:
        """The first step behind this one whose set is to be persisted, where steps decide."""
        self._begin_run(sessions)
        self._complain_of_slowness(now)
        if self._pacing is not None:
            under_way = self._watch(self._pacing, sessions, now)
            return self._pacing.next_step(after, under_way) if now >= self._due_s else None
        every = self._settings.every_steps
        return (after // every + 1) * every if every and now >= self._due_s else None

    def _watch(self, pacing: Pacing, sessions: Sequence[Session], now: float) -> int:
        """Look at the training; how many sets are under way, ordered ones included."""
        self._looked_s = now
        reached = min(session.log.step for session in sessions)
        near = [step for step in self._announced.values() if step is not None and step <= reached + 1]
        if now - self._announced_s > MISSED_S:
            missed, near = len(near), []  # a rank was past the step when it was told
        else:
            missed = 0
        epoch = (self._run, *(session.generation for session in sessions))
        pacing.look(now, reached, bool(self._sets or near), epoch)
        return len(self._sets) + len(self._announced) - missed

    def announce(self, serial: int, step: int | None, sessions: Sequence[Session]) -> None:
        """A set that is about to be ordered and is to be described, as it will be persisted."""
        self._announced[serial] = step
        if self._pacing is not None:
            self._announced_s = self._looked_s
            self._pacing.begun()
        for session in sessions:
            session.log.describe_snapshot(serial)

    def _begin_run(self, sessions: Sequence[Session]) -> None:
        run = run_name(sessions)
        if run != self._run:  # workers that were started again, or run elsewhere
            self._run, self._due_s, self._complete = run, 0.0, 0
            self._sets.clear()
            self._announced.clear()
            self._lease(sessions)
            for session in sessions if self._reduced else ():
                session.mirror_note = self._reduced
            if self._settings.overhead:
                self._pacing = Pacing(1 + self._settings.overhead, self._settings.in_flight)

    def offer(
        self, serial: int, sessions: Sequence[Session], commits: Mapping[int, replay.Commit], now: float
    ) -> None:
        """A set that counts, of these commits by rank; persisted if it was announced and finds a slot."""
        if run_name(sessions) != self._run:
            return
        step = max(commit.step for commit in commits.values())
        wanted = serial in self._announced and self._announced[serial] in (None, step)
        self._announced = {later: at for later, at in self._announced.items() if later > serial}
        if not wanted:
            return
        allowed = self._pacing.in_flight if self._pacing is not None else self._settings.in_flight
        if len(self._sets) >= allowed:
            self._job.persist.skipped += 1
            return
        self._due_s = max(self._due_s, now + self._settings.every_s)
        ranks = {session.rank for session in sessions}
        on_other_hosts = any(session.host for session in sessions)
        self._sets[serial] = Set(
            serial, self._run, sessions, commits, step, now, missing=ranks, on_other_hosts=on_other_hosts
        )
        for of in self._sets.values():
            of.in_flight = max(of.in_flight, len(self._sets))
        self._lease(sessions)
        self._parts.persist(serial, self._run, sessions, self._known(sessions))

    def _known(self, sessions: Sequence[Session]) -> set[int] | None:
        """What counts of this run; None: a proxyd before us may know of more."""
        if not self._complete and not any(session.host for session in sessions):
            return None
        return {*self._sets, *filter(None, (self._complete, self._held))}

    def take_now(self, written: Written) -> None:
        """An answer that has just come."""
        self.take(written, time.monotonic())

    def take(self, written: Written, now: float) -> None:
        """A rank's part is durable, or is not."""
        of = self._sets.get(written.serial)
        if of is None or written.run != of.run or written.rank not in of.missing:
            return
        of.missing.discard(written.rank)
        of.bytes += written.bytes
        of.gone |= written.gone
        of.failed = of.failed or written.error
        if of.missing:
            return
        del self._sets[of.serial]
        self._lease(of.sessions)
        self._conclude(of, now)

    def _conclude(self, of: Set, now: float) -> None:
        """All ranks have answered."""
        if of.serial < self._complete:  # a newer one overtook it: stores have let go of it, or refused it
            if self._held:  # or not yet
                self._parts.tell(Discard(of.serial, of.run))
            return
        if of.failed:
            self._parts.tell(Discard(of.serial, of.run))
            if of.gone:
                self._job.persist.skipped += 1
            else:
                self._trouble(of, now)
            return
        self._complete, self._took_s = of.serial, now - of.begun_s
        self._job.persist.copied += 1
        self._job.persist.bytes += of.bytes
        if self.mirroring is not None and of.is_within_reach:
            self.mirroring.offer(CompleteSet(of.serial, of.run, of.sessions))
        self._remember(of)
        self._release(of.step)  # only now: who follows a proxyd that dies here looks for what is written down
        self._pace(of, now)
        log.debug(
            "snapshot is durable", job=self._job.name, serial=of.serial, step=of.step, bytes=of.bytes,
            seconds=round(now - of.begun_s, 3),
        )  # fmt: skip

    def _remember(self, of: Set) -> None:
        """Stores keep nothing older than a set that is complete."""
        run = self._settings.directory / self._job.name / of.run
        if self._job.span is not None:
            self._job.span.stored = Stored(of.step, run)
            self._note()
        if not of.is_within_reach:
            for session in of.sessions:
                session.persist_note = ""
            return
        for session in of.sessions:
            commit = of.commits[session.rank]
            session.persist_note = ""
            session.durable = [Durable(of.serial, run, of.bytes, facts_of(commit), commit.log_offset)]
        if self._settings.stays_in_memory:
            return
        self._note()  # who follows if proxyd dies would look for it in memory
        for session in of.sessions:
            session.log.log_kept_from = of.commits[session.rank].log_offset  # before the floor lets go of it
            session.log.snapshot_floor = max(session.log.snapshot_floor, of.serial + 1)

    def break_off(self) -> None:
        """Let go of all that is under way: the memory that it is copied from is about to change."""
        sessions = [session for of in self._sets.values() for session in of.sessions]
        self._sets.clear()
        self._announced.clear()
        self._lease(sessions)
        self._parts.break_off()

    def _pace(self, of: Set, now: float) -> None:
        """Let what is durable tell how often the next ones are to come."""
        every = self._settings.every_steps
        if self._pacing is not None:
            before = self._pacing.interval
            self._pacing.durable(now, now - of.begun_s, of.in_flight, of.bytes, len(self._sets))
            every = self._pacing.interval
            if every != before:
                log.info("snapshots on storage", job=self._job.name, chosen=self._pacing.told())
        for session in of.sessions:
            session.persist_interval = every
            session.persist_choice = self._pacing.told() if self._pacing is not None else ""

    @property
    def _held(self) -> int:
        return self.mirroring.held(self._run) if self.mirroring is not None else 0

    def _release(self, step: int = 0) -> None:
        """What is older than the newest complete set may go, but for what is being copied elsewhere."""
        if self._complete:
            self._parts.tell(Release(self._complete, self._run, self._held), step)

    def _lease(self, sessions: Sequence[Session]) -> None:
        self._job.leases.hold(HOLDER, self._sets, sessions)

    def _complain_of_slowness(self, now: float) -> None:
        longest = now - min((of.begun_s for of in self._sets.values()), default=now)
        slow_s = min(SLOW_S, max(SLOW_LEAST_S, SLOW_FACTOR * self._took_s))
        if longest > slow_s:
            self._tell(f"its storage is slow, one has been under way for {slow_s:.0f} s and more")

    def _trouble(self, of: Set, now: float) -> None:
        self._due_s = max(self._due_s, now + RETRY_S)
        self._job.persist.failures += 1
        self._tell(of.failed)
        self._parts.dismiss()

    def _tell(self, reason: str) -> None:
        note = f"no snapshot reaches {self._settings.directory}: {reason}"
        for session in self._job.active_sessions():
            if session.persist_note != note:
                session.persist_note = note
                log.warning("a snapshot is not durable", job=self._job.name, rank=session.rank, reason=reason)


def run_name(sessions: Sequence[Session]) -> str:
    """The name of one start of all workers; the same for a proxyd that adopted them.

    Where ranks run on other hosts, another one whenever one has moved: no two hosts write one store.
    """
    directory = sessions[0].directory
    name = f"{directory.parent.parent.name}.{directory.name}"
    if not any(session.host for session in sessions):
        return name
    # Here, a rank elsewhere has a fresh directory for each stay; one that has come back has another worker.
    stays = [(session.directory, session.worker.pid, session.worker.start_ticks) for session in sessions]
    return f"{name}.{hashlib.sha256(repr(stays).encode()).hexdigest()[:8]}"
