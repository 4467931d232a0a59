"""Orders snapshots, and lets go of those that newer ones have made superfluous.

A replay from snapshots is in lockstep, so all ranks take theirs at the end of one minibatch.  A set counts
when it is complete on all of them and lies on a consistent cut; until then the one before it stays.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Mapping, Sequence

import structlog

from understudy import replay
from understudy.recovery.base.background import Complaints
from understudy.recovery.host.evidence import rank_facts
from understudy.recovery.job.coordinator import Coordinator
from understudy.recovery.planning.cuts import CutSearch
from understudy.recovery.snapshots.persistence import Persistence
from understudy.recovery.spanning.interface import Images
from understudy.recovery.state.jobs import Job, Session

log = structlog.get_logger()

LOOK_S = 0.05
SHORTEST_INTERVAL_S = 0.5
"""Between two snapshots, however little they cost; unless so much log has come together meanwhile:"""
MUCH_LOG = 32 << 20
"""Bytes.  Segments that are used again soon are warm; fresh pages cost more than many a snapshot."""
AHEAD_S = 0.02
"""How far ahead of the fastest rank a snapshot is ordered, beside one minibatch."""
LATE_S = 2.0
"""An order for a minibatch that does not end for so long may be changed if the log fills up."""
MOST_PLANNED = replay.SNAPSHOT_ORDERS - 1
"""Orders for storage, ahead of the training; one place is left for an order that makes room in a log."""
FULL = 0.5
"""Share of a log's cap at which a snapshot is due early: the log before it can go then."""
FULL_OF_TEMPLATES = 0.75
"""Share of a log's dictionary, likewise; half of it is always kept."""


class SnapshotKeeper:
    """Sees to it that one job has a recent snapshot, within a share of the time."""

    def __init__(
        self,
        job: Job,
        coordinator: Coordinator,
        overhead: float,
        persistence: Persistence | None = None,
        images: Images | None = None,
    ) -> None:
        """`images`: of workers, which go with some of the sets."""
        self._job = job
        self._images = images
        self._persistence = persistence
        self._coordinator = coordinator
        self._overhead = overhead
        self._sessions: list[Session] = []
        self._off = ""
        self._making_room = False
        self._pressed = 0
        self._sets = 0
        self._ordered: int | None = None
        """Step of the order under way; None: at the next commit."""
        self._serial = 0
        """Of the order under way; 0: there is none."""
        self._ordered_s = 0.0
        self._due_s = 0.0
        """When memory is to have another one."""
        self._affordable_s = 0.0
        """When one more may be ordered within their share of the time; validations take theirs besides."""
        self._for_room = 0
        """Serial of an order that is to let go of log kept for the sake of a snapshot on storage; 0: none."""
        self._lead = 1
        self._planned: dict[int, int] = {}
        """Orders for storage that not all ranks have reached: serial -> step."""
        self._pace: tuple[float, int] = (0.0, 0)
        self._stepped_s = 0.0
        """When a step last ended."""

    @property
    def _storage_only(self) -> bool:
        return self._persistence is not None and not self._persistence.stays_in_memory

    async def run(self) -> None:
        """Until cancelled."""
        complaints = Complaints("snapshots")
        while self._overhead > 0:
            # A set of a rank whose host is lost may seem to be complete, and is lost, too.
            restores_from_image = any(session.restores_from_image for session in self._job.sessions.values())
            if not self._coordinator.restoring and not restores_from_image:
                with complaints.survived(self._job.name):
                    self.look(time.monotonic())
            await asyncio.sleep(LOOK_S)

    def hasten(self) -> None:
        """The next one is due now, whatever it costs."""
        self._due_s = 0.0

    def look(self, now: float) -> None:
        """One look at `now`, seconds."""
        sessions = self._job.active_sessions()
        if not sessions or len(sessions) < sessions[0].world:
            return
        if self._sessions != sessions:  # workers that were started again
            self._sessions, self._serial, self._sets, self._due_s = sessions, 0, 0, 0.0
            self._planned.clear()
            self._for_room = 0
        if self._off:  # a session may be new
            self._suspend(sessions, self._off)
            return
        if self._making_room:
            self._go_on(sessions, now)
            return
        rate = self._steps_per_second(sessions, now)
        self._count(sessions, now)
        if self._off or self._relieve(sessions):
            return
        if self._serial and self._missed(sessions, now):
            self._lead = min(2 * self._lead, 1 << 20)
            self._serial = 0
        if self._order_for_storage(sessions, now, rate) and not self._filling(sessions, now):
            return  # these count, too
        if not self._serial and (
            now >= self._due_s
            or self._storage_wants_one(sessions, now)
            or (now >= self._affordable_s and max(map(_log_bytes, sessions)) > MUCH_LOG)
            or self._filling(sessions, now)
        ):
            self._order(sessions, now, rate)

    def _count(self, sessions: Sequence[Session], now: float) -> None:
        """Move the floors to a set that has become complete."""
        if any(s.log.snapshot_failed > s.log.snapshot_floor for s in sessions):
            self._suspend(sessions, "there was no memory for a snapshot (see --snapshot-limit and /dev/shm)")
            return
        published = [{kept.serial: kept for kept in s.log.snapshots()} for s in sessions]
        common = set.intersection(*(set(kept) for kept in published))
        newest = max(common, default=0)
        if newest <= min(s.log.snapshot_floor for s in sessions):
            return
        choices = {s.rank: kept[newest] for s, kept in zip(sessions, published, strict=True)}
        if any(newest in s.refused_snapshots for s in sessions):  # what it has is damaged, or corrupted
            if newest >= self._serial:
                self._serial = 0
            return
        if not _is_consistent(sessions, {rank: kept.commit.number for rank, kept in choices.items()}):
            log.debug("snapshots do not fit together", job=self._job.name, serial=newest)
            if newest == self._serial:
                self._lead, self._serial = 2 * self._lead, 0
            return
        for session in sessions:
            session.log.snapshot_floor = newest
            if 0 < self._for_room <= newest or not self._storage_only:
                session.log.log_kept_from = self._images.kept_from(session) if self._images is not None else 0
            session.snapshot_note = ""
        if newest >= self._serial:
            self._serial = 0
        if newest >= self._for_room:
            self._for_room = 0
        self._sets += 1
        cost = max(kept.seconds for kept in choices.values())
        affordable_s = now + cost / self._overhead
        if newest <= min(s.log.snapshot_ordered for s in sessions):
            self._affordable_s = affordable_s
        self._due_s = max(now + SHORTEST_INTERVAL_S, affordable_s)
        log.debug(
            "snapshots", job=self._job.name, serial=newest, seconds=cost,
            commits={rank: kept.commit.number for rank, kept in choices.items()},
        )  # fmt: skip
        commits = {rank: kept.commit for rank, kept in choices.items()}
        if self._persistence is not None:
            self._persistence.offer(newest, sessions, commits, now)
        if self._images is not None:
            self._images.offer(newest, sessions, commits, pressed=_is_filling(sessions))

    def _storage_wants_one(self, sessions: Sequence[Session], now: float) -> bool:
        """Whatever memory has: what a server takes for its validations nobody writes to storage."""
        if self._persistence is None or now < self._affordable_s:
            return False
        return self._persistence.due(sessions, now, pressed=False)

    def _order_for_storage(self, sessions: Sequence[Session], now: float, rate: float) -> bool:
        """Sets that are due at certain steps, as soon as those are near; whether any is under way."""
        if self._persistence is None or any(s.log.commit_count == 0 for s in sessions):
            return False
        reached = min(s.log.step for s in sessions)
        taken = min(s.log.snapshot_begun for s in sessions)
        self._planned = {
            serial: step for serial, step in self._planned.items() if serial > taken and step >= reached
        }
        ahead = _begun(sessions) + self._lead + math.ceil(rate * AHEAD_S)
        near = ahead + MOST_PLANNED + math.ceil(2 * rate * LOOK_S)  # beyond it, the next look is early enough
        after = max(ahead - 1, *self._planned.values()) if self._planned else ahead - 1
        while len(self._planned) < MOST_PLANNED:
            step = self._persistence.next_step(after, sessions, now)
            if step is None or step > near or not self._enough_memory(sessions):
                break
            serial = _next_serial(sessions)
            self._persistence.announce(serial, step, sessions)
            self._give(serial, step, sessions, now)
            self._planned[serial] = after = step
        return bool(self._planned)

    def _order(self, sessions: Sequence[Session], now: float, rate: float) -> None:
        if any(s.log.commit_count == 0 for s in sessions) and not self._filling(sessions, now):
            return  # most of the state does not exist yet
        if not self._enough_memory(sessions):
            return
        pressed = self._storage_only and self._filling(sessions, now)
        described = self._persistence is not None and self._persistence.due(sessions, now, pressed)
        if self._storage_only and not described and not pressed:
            return
        self._serial = _next_serial(sessions)
        self._for_room = self._serial if pressed else 0
        self._ordered = None
        # A rank alone needs no agreement; and nobody's minibatch may ever end.
        if (len(sessions) > 1 or described) and not (rate == 0 and self._filling(sessions, now)):
            begun = _begun(sessions) if described else max(s.log.step for s in sessions)
            self._ordered = begun + self._lead + math.ceil(rate * AHEAD_S)
        if described and self._persistence is not None:
            self._persistence.announce(self._serial, self._ordered, sessions)
        self._give(self._serial, self._ordered, sessions, now)

    def _give(self, serial: int, step: int | None, sessions: Sequence[Session], now: float) -> None:
        self._ordered_s = now
        for session in sessions:
            session.log.order_snapshot(serial, step)

    def _missed(self, sessions: Sequence[Session], now: float) -> bool:
        """Whether a rank was past the ordered step when it read the order, or the step does not come."""
        if self._ordered is None:
            return False
        if now - self._ordered_s > LATE_S and self._filling(sessions, now):
            return True
        wanted = self._ordered
        return any(s.log.step > wanted + 1 and s.log.snapshot_begun < self._serial for s in sessions)

    def _filling(self, sessions: Sequence[Session], now: float) -> bool:
        """Whether a log is filling up with what only a snapshot can let go.

        Where minibatches do not end (no optimizer, an evaluation) nothing else ever comes: then 32 MiB do.
        """
        if now - self._ordered_s < SHORTEST_INTERVAL_S:
            return False
        stands = now - self._stepped_s > LATE_S and now >= self._affordable_s
        return _is_filling(sessions) or (stands and max(map(_log_bytes, sessions)) > MUCH_LOG)

    def _relieve(self, sessions: Sequence[Session]) -> bool:
        """A worker waits for room: let go of the log that only snapshots need, then begin anew.

        A rank alone does that by itself, with a snapshot on the spot.
        """
        waits = len(sessions) > 1 and any(s.log.backpressure for s in sessions)
        self._pressed = self._pressed + 1 if waits else 0
        if self._pressed < 2:
            return False
        self._making_room = True
        for session in sessions:
            session.log.snapshot_suspended = True
            session.snapshot_note = "its log was full and was cut: until the next snapshot there is none"
        return True

    def _go_on(self, sessions: Sequence[Session], now: float) -> None:
        """After the log was cut: once nothing is left of the old snapshots."""
        if any(s.log.snapshots() for s in sessions):
            return
        self._making_room, self._pressed, self._serial, self._due_s = False, 0, 0, now
        for session in sessions:
            session.log.snapshot_suspended = False

    def _enough_memory(self, sessions: Sequence[Session]) -> bool:
        """Two sets live at a time; once there were two, the next one finds its memory, unless it went."""
        state = os.statvfs(sessions[0].directory)
        free, total = state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize
        wanted = sum(s.log.live_bytes for s in sessions) if self._sets < 2 or self._storage_only else 0
        spare = min(1 << 30, total // 8)
        if free >= wanted + spare:
            return True
        reason = (
            f"they need {wanted >> 20} MiB and leave {spare >> 20} MiB to the logs, but only {free >> 20} "
            "MiB are free where both lie (/dev/shm, or --log-dir)"
        )
        if self._sets < 2:
            self._suspend(sessions, reason)
        for session in sessions:  # what went was somebody else's for a while, and may be free again
            session.snapshot_note = f"no snapshots: {reason}"
        return False

    def _suspend(self, sessions: Sequence[Session], reason: str) -> None:
        if not self._off:
            log.warning("no snapshots are taken any more", job=self._job.name, reason=reason)
        self._off = reason
        for session in sessions:
            session.log.snapshot_suspended = True
            session.snapshot_note = f"no snapshots: {reason}"

    def _steps_per_second(self, sessions: Sequence[Session], now: float) -> float:
        """The speed of the fastest rank, since the last look."""
        step = max(s.log.step for s in sessions)
        before, self._pace = self._pace, (now, step)
        if step != before[1]:
            self._stepped_s = now
        return max(0.0, (step - before[1]) / (now - before[0])) if before[0] and now > before[0] else 0.0


def _next_serial(sessions: Sequence[Session]) -> int:
    return 1 + max(max(s.log.snapshot_ordered, s.log.snapshot_begun, s.log.snapshot_floor) for s in sessions)


def _begun(sessions: Sequence[Session]) -> int:
    """Steps that a server or a worker, who runs ahead of it, has begun."""
    return max(max(s.log.step, s.log.worker_steps) for s in sessions)


def _is_filling(sessions: Sequence[Session]) -> bool:
    return any(
        _log_bytes(session) > FULL * session.log.segment_count * session.log.segment_bytes
        or _template_bytes(session) > FULL_OF_TEMPLATES * session.log.dictionary_bytes
        for session in sessions
    )


def _log_bytes(session: Session) -> int:
    """The bytes of records that were run and are still there."""
    log = session.log
    return log.cursor - log.freed_segments * log.segment_bytes


def _template_bytes(session: Session) -> int:
    """The bytes of regions that have not been recycled."""
    return session.log.dictionary_tail - session.log.dictionary_begin


def _is_consistent(sessions: Sequence[Session], numbers: Mapping[int, int]) -> bool:
    """Whether the ranks' snapshots of these commits lie on a consistent cut."""
    ranks = [rank_facts(session, True) for session in sessions]
    choices = {
        rank.rank: [snapshot for snapshot in rank.snapshots if snapshot.number == numbers[rank.rank]]
        for rank in ranks
    }
    return CutSearch(ranks, choices).newest() is not None
