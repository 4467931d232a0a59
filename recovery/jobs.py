"""What proxyd remembers: jobs (one per proxyrun) and their sessions (one per worker process)."""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import replay
from recovery.control import pb
from recovery.drills import KINDS, Drill
from recovery.facts import Phase
from recovery.processes import Watched
from recovery.servers import Server

SESSION_LOST = 1
SESSION_CLOSED = 2
"""SessionState of the log."""

CUT_LOG = "its log was full and has been cut: until its next complete commit a fault cannot be survived"

PHASES = (Phase.FORWARD_BACKWARD, Phase.OPTIMIZER)


@dataclass(eq=False)
class Session:
    """A worker, its log, and the device server that executes it now."""

    job: Job
    rank: int
    world: int
    device: str
    device_index: int
    threads: int
    worker: Watched
    directory: Path
    log: replay.Log
    server: Server
    state: str = "running"
    """"running", "recovering", "ended" or "lost"."""
    generation: int = 0
    recoveries: int = 0
    note: str = ""
    killed_ns: int = 0
    """When a drill of `recoveryctl` killed the server."""
    hollow: bool = False
    """Its server is fresh and holds no state yet."""
    restored_commit: int = 0
    """Where its server's memory begins: it has no pre-images of what came before."""
    drills_seen: int = 0
    """Fired drills whose deaths were handled."""
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once nothing of the session is left."""

    @property
    def active(self) -> bool:
        """Whether recovery still concerns it."""
        return self.state in ("running", "recovering") and self.log.session_state == 0

    @property
    def phase(self) -> Phase:
        """What its server executes."""
        return PHASES[min(self.log.phase, 1)]

    def lose(self, message: str) -> None:
        """Its worker raises `message` at its next call."""
        if self.log.session_state == 0:
            self.log.lose(message[:1000])
        self.state = "lost"
        self.note = message

    def status(self) -> pb.RankStatus:
        """As `recoveryctl status` shows it."""
        log = self.log
        return pb.RankStatus(
            job=self.job.name,
            rank=self.rank,
            device=self.device,
            worker_pid=self.worker.pid,
            server_pid=self.server.pid,
            state=self.state,
            step=log.step,
            phase=self.phase.value,
            log_bytes=max(0, log.tail - log.freed_segments * log.segment_bytes),
            cursor_lag=max(0, log.tail_index - log.cursor_index),
            commit=log.commit_count,
            floor_commit=log.floor_commit,
            generation=self.generation,
            live_buffers=log.live_buffers,
            live_bytes=log.live_bytes,
            undo_bytes=log.undo_bytes,
            shadow_bytes=log.shadow_used_bytes,
            log_directory=str(self.directory),
            backpressure=bool(log.backpressure),
            recoveries=self.recoveries,
            note=self.note or (CUT_LOG if log.degraded else ""),
        )


@dataclass(frozen=True)
class Ended:
    """What is kept of a session when its log is gone."""

    rank: int
    clean: bool
    steps: int
    calls_per_step: int
    bytes_per_step: int
    replies_compared: int
    replies_different: int
    status: pb.RankStatus


@dataclass
class ScheduledDrill:
    """A drill ordered for a job, and its place in the log of the rank it concerns."""

    drill: Drill
    slot: int = -1
    fired: bool = False


@dataclass(eq=False)
class Job:
    """Everything one proxyrun started."""

    name: str
    launcher: Watched | None
    drills: list[ScheduledDrill]
    sessions: dict[int, Session] = field(default_factory=dict)
    ended: list[Ended] = field(default_factory=list)
    departed: dict[int, bool] = field(default_factory=dict)
    """Ranks whose worker has left and has no successor yet -> whether it left in order."""
    recoveries: list[pb.Recovery] = field(default_factory=list)
    generation: int = 0
    openings: int = 0
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a session opens and while a recovery runs: never both."""
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    """Notified when a recovery or a session ended."""
    closing: bool = False

    def active_sessions(self) -> list[Session]:
        """Sessions that recovery concerns, by rank."""
        return [self.sessions[rank] for rank in sorted(self.sessions) if self.sessions[rank].active]

    def arm(self, session: Session) -> None:
        """Write the drills for a session's rank that have not fired into its log."""
        for scheduled in self.drills:
            if scheduled.drill.rank == session.rank and not scheduled.fired and scheduled.drill.step:
                scheduled.slot = len(session.log.drills())
                session.log.add_drill(KINDS[scheduled.drill.kind], scheduled.drill.step, scheduled.drill.call)

    def note_fired(self, session: Session) -> None:
        """Take over from the log which drills fired."""
        marks = session.log.drills()
        for scheduled in self.drills:
            if scheduled.drill.rank == session.rank and 0 <= scheduled.slot < len(marks):
                scheduled.fired = scheduled.fired or bool(marks[scheduled.slot][3])

    def remember(self, session: Session, clean: bool) -> None:
        """Keep what the report needs before the log goes."""
        log = session.log
        self.note_fired(session)
        commits = log.commits()
        self.ended.append(
            Ended(
                rank=session.rank,
                clean=clean,
                steps=commits[-1].step if commits else 0,
                calls_per_step=log.median_calls_per_step,
                bytes_per_step=log.median_bytes_per_step,
                replies_compared=log.replies_compared,
                replies_different=log.replies_different,
                status=session.status(),
            )
        )

    def report(self) -> pb.JobReport:
        """The summary of sessions that ended."""

        def median(numbers: list[int]) -> int:
            return int(statistics.median(numbers)) if numbers else 0

        return pb.JobReport(
            steps=max((ended.steps for ended in self.ended), default=0),
            calls_per_step=median([ended.calls_per_step for ended in self.ended if ended.calls_per_step]),
            log_bytes_per_step=median([ended.bytes_per_step for ended in self.ended if ended.bytes_per_step]),
            recoveries=self.recoveries,
            faults=[pb.FaultOutcome(drill=s.drill.message(), fired=s.fired) for s in self.drills],
            ranks=[ended.status for ended in self.ended],
            replies_compared=sum(ended.replies_compared for ended in self.ended),
            replies_different=sum(ended.replies_different for ended in self.ended),
        )
