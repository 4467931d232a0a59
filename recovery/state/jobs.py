"""What proxyd remembers: jobs (one per proxyrun) and their sessions (one per worker process)."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from understudy import replay
from understudy.protos import control_pb2 as pb
from understudy.recovery.agent_api.server import Server, is_gpu
from understudy.recovery.drills.fault_table import BY_NAME
from understudy.recovery.history import events
from understudy.recovery.history.recorder import Recorder, new_id, now_ms
from understudy.recovery.history.report import counts_of
from understudy.recovery.machine.processes import Watched
from understudy.recovery.planning.facts import Phase, RankFacts
from understudy.recovery.state.counts import CopyCounts, Ended, LogCounts, ScheduledDrill
from understudy.recovery.state.durable import Durable
from understudy.recovery.state.pace import StepClock
from understudy.recovery.state.recovery_progress import RecoveryProgress
from understudy.recovery.state.snapshot_leases import SnapshotLeases
from understudy.recovery.state.span import Span

SESSION_LOST = 1
SESSION_CLOSED = 2
"""SessionState of the log."""
MOST_REFUSED = 8
"""Sentences about sessions that were not opened; the ranks of a job tend to fail alike."""
DRILL_FIRED = 1
DRILL_DONE = 2
"""DrillState of the log; 0 is armed."""

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
    clock: StepClock = field(default_factory=StepClock)
    state: str = "running"
    """"running", "recovering", "ended" or "lost"."""
    generation: int = 0
    recoveries: int = 0
    note: str = ""
    killed_ns: int = 0
    """When a drill of `recoveryctl` killed the server."""
    asked_index: int = -1
    """The device its worker asked for; it may have had to move."""
    destination: int | None = None
    """The device to which it is to move, as somebody wishes; kept for it."""
    destination_host: str = ""
    """The host, likewise, if that is another one than where it runs."""
    destination_device: str = ""
    """There, if it matters."""
    transfer: pb.Transfer | None = None
    """How it came to where it is, until that is told of."""
    declined: str = ""
    """Why what was ordered last of it did not come about."""
    source_server: Server | None = None
    """Its former server, while the new one copies from it."""
    lacks_state: bool = False
    """Its server is fresh and holds no state yet."""
    restored_commit: int = 0
    """Where its server's memory begins: it has no pre-images of what came before."""
    resumed_commit: int = 0
    """Of the newest restored server that ran on: it overwrites what shadows of its predecessors held."""
    former_resumed_commit: int = 0
    """The one before, while the newest one is rolled forward."""
    rolled_commit: int = 0
    """Where its newest server began to be rolled forward; 0 if it was not."""
    refused_commit: int = 0
    """From where a server could not go on with state of others, rolled forward or not; 0: none."""
    unread: Counter[int] = field(default_factory=Counter)
    """Ranks whose state its servers could not read, and how often, since it was restored."""
    snapshot_note: str = ""
    """Why no snapshot can be had, if so."""
    refused_snapshots: set[int] = field(default_factory=set)
    """Serials of those in host memory that a server found damaged, or that are of corrupted state."""
    durable: list[Durable] = field(default_factory=list)
    """Snapshots that are durable on all ranks, oldest first."""
    persist_interval: int = 0
    """Steps from one to the next; 0: time decides, or nothing is chosen yet."""
    persist_choice: str = ""
    """How often they are taken, and why, where that is chosen while training."""
    persist_note: str = ""
    """Why none gets there, if so."""
    logged_step: int = 0
    """Of the newest commit up to which its log is on storage; 0: there is none."""
    logged_offset: int = 0
    """Up to which its log is on storage."""
    log_note: str = ""
    """Why it does not get there, if so."""
    mirrored_step: int = 0
    """Of the newest snapshot in the second tier; 0: there is none."""
    mirror_note: str = ""
    """Why none gets there, if so."""
    host: str = ""
    """Where it runs, if that is another one."""
    relay: str = ""
    """The socket of what can move its worker; empty: nothing can."""
    restores_from_image: int = 0
    """Serial of the snapshot with which its worker comes back, as its host is lost; 0: it does not."""
    cpu_image_step: int = 0
    """Of the newest CPU image of it; 0: there is none."""
    cpu_image_note: str = ""
    """Why there is no newer one, if so."""
    moving: asyncio.Event | None = None
    """Set once a move of its worker that is under way has ended."""
    obstacles: tuple[str, ...] | None = None
    """What stands in the way of moving its worker; None: nobody has looked yet."""
    drills_seen: set[int] = field(default_factory=set)
    """Slots of drills that fired and whose consequences were noticed."""
    block_until_commit: int = 0
    """Up to where its next server waits after each call, so that a late error names its record."""
    alarms: tuple[int, int] = (-1, 0)
    not_validated: str = ""
    """What is never executed twice, and why."""
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once nothing of the session is left."""

    @property
    def on_gpu(self) -> bool:
        """Whether its device is one."""
        return is_gpu(self.device)

    @property
    def persisted_step(self) -> int:
        """The step of the newest snapshot that is durable on all ranks; 0: there is none."""
        stored = self.job.span.stored if self.job.span is not None else None
        known = [durable.commit.step for durable in self.durable]
        return max([*known, stored.step] if stored is not None else known, default=0)

    @property
    def log_lag(self) -> int:
        """Bytes of records that were run and are not on storage."""
        return max(0, self.log.cursor - self.logged_offset)

    @property
    def active(self) -> bool:
        """Whether recovery still concerns it."""
        return self.state in ("running", "recovering") and self.log.session_state == 0

    @property
    def has_state(self) -> bool:
        """Whether its server runs and holds the rank's memory."""
        return self.server.process.running and not self.lacks_state

    def hold_state_of(self, commit: int) -> None:
        """Its new server stands at that commit; those behind are made anew."""
        self.lacks_state, self.restored_commit = False, commit
        if commit < self.refused_commit:
            self.refused_commit = 0

    def break_off_roll_forward(self) -> None:
        """Its server stands still amid its step, and has overwritten nothing: it has made no commit."""
        self.lacks_state = True
        self.resumed_commit = self.former_resumed_commit

    @property
    def rolling(self) -> bool:
        """Whether its server has yet to finish the step through which it is rolled forward."""
        return 0 < self.rolled_commit >= self.log.commit_count

    @property
    def inside_step(self) -> bool:
        """Whether its server executes an optimizer step, and has not seen its end."""
        if self.phase is not Phase.OPTIMIZER:
            return False
        commits = self.log.commits()
        return self.log.step <= (commits[-1].step if commits else 0) + 1

    @property
    def phase(self) -> Phase:
        """What its server executes."""
        return PHASES[min(self.log.phase, 1)]

    def adopted_from(self, worker_pid: int) -> bool:
        """Whether a predecessor opened it for that worker, who has not begun to use it."""
        return bool(self.job.adoptions) and self.worker.pid == worker_pid and self.log.tail_index == 0

    def doublings(self, record: int) -> int:
        """How often a sleeping server was ended at this record: each time the next gets twice as long."""
        return self.alarms[1] if self.alarms[0] == record else 0

    def note_alarm(self, record: int) -> None:
        """A server was ended at this record on suspicion."""
        self.alarms = (record, self.doublings(record) + 1)

    @property
    def migratable(self) -> str:
        """ "yes", or "no (why)"; empty: nobody has looked yet."""
        if not self.obstacles:
            return "" if self.obstacles is None else "yes"
        first, *more = self.obstacles
        return f"no ({first}{f'; and {len(more)} more' if more else ''})"

    def decline(self, reason: str) -> None:
        """What was ordered of it does not come about; whoever ordered it may try again."""
        self.destination, self.destination_host, self.declined = None, "", reason

    def fail(self, message: str) -> None:
        """Its worker raises `message` at its next call."""
        if self.log.session_state == 0:
            self.log.lose(message[:1000])
        self.state = "lost"
        self.note = message

    def status(self, state: str = "") -> pb.RankStatus:
        """As `recoveryctl status` shows it; `state`: another one than it has now."""
        log = self.log
        return pb.RankStatus(
            job=self.job.name,
            rank=self.rank,
            device=self.device,
            worker_pid=self.worker.pid,
            server_pid=self.server.pid,
            state=state or self.state,
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
            note=self.note
            or (CUT_LOG if log.degraded else self.snapshot_note)
            or self.persist_note
            or self.log_note
            or self.mirror_note
            or self.cpu_image_note,
            persisted_step=self.persisted_step,
            logged_step=self.logged_step,
            log_lag_bytes=self.log_lag if self.logged_offset else 0,
            mirrored_step=self.mirrored_step,
            persist_choice=self.persist_choice,
            cpu_image_step=self.cpu_image_step,
            migratable=self.migratable,
            host=self.host,
            leader=self.job.span.leader if self.job.span is not None else "",
            heir=", ".join(self.job.span.standbys) if self.job.span is not None else "",
            replies_different=sum(self.job.replies_different().values()),
            not_replayable=self.job.not_replayable,
            not_validated=self.not_validated,
            snapshot_bytes=log.snapshot_used_bytes,
            snapshots=log.snapshots_taken,
            step_s=self.clock.step_s,
            step_age_s=self.clock.age_s(time.monotonic_ns()),
            snapshot_s=log.snapshot_ns / 1e9,
            snapshot_commit=max(
                (kept.commit.number for kept in log.snapshots() if kept.serial == log.snapshot_floor),
                default=0,
            ),
        )


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
    last_facts: dict[int, RankFacts] = field(default_factory=dict)
    """Of those ranks, what was known when they left."""
    recoveries: list[pb.Recovery] = field(default_factory=list)
    validations: int = 0
    """Minibatches that were executed twice."""
    not_replayable: str = ""
    """Where the two executions differed."""
    decision: pb.JournaledDecision | None = None
    """What is being done about a fault."""
    progress: RecoveryProgress = field(default_factory=RecoveryProgress)
    waits_for: str = ""
    """What has to come before anything can be done about it; empty: nothing."""
    corruption: pb.JournaledCorruption | None = None
    """Whose repair whoever led it before us had begun, and we have not."""
    adoptions: list[pb.Adoption] = field(default_factory=list)
    """When a successor of a proxyd that died took it over."""
    persist: CopyCounts = field(default_factory=CopyCounts)
    mirror: CopyCounts = field(default_factory=CopyCounts)
    stored_log: LogCounts = field(default_factory=LogCounts)
    refused: list[str] = field(default_factory=list)
    """Why sessions were not opened."""
    generation: int = 0
    openings: int = 0
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a session opens and while a recovery runs: never both."""
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    """Notified when a recovery or a session ended."""
    closing: bool = False
    foreign_relays: Path | None = None
    """Directory of its relays, if it was begun on another host: it ends here with its last rank."""
    span: Span | None = None
    """If it spans hosts, or may come to."""
    leases: SnapshotLeases = field(default_factory=SnapshotLeases)
    """Of snapshots in host memory."""
    history: Recorder = field(default_factory=Recorder)

    @property
    def token(self) -> bytes:
        """By which device servers of several hosts know each other; empty: they do not meet."""
        return self.span.token if self.span is not None else b""

    def adopted_from(self, launcher_pid: int) -> bool:
        """Whether a predecessor opened it for that launcher, and no rank has come yet."""
        known = self.launcher is not None and self.launcher.pid == launcher_pid
        return known and bool(self.adoptions) and not self.openings

    def active_sessions(self) -> list[Session]:
        """Sessions that recovery concerns, by rank."""
        return [self.sessions[rank] for rank in sorted(self.sessions) if self.sessions[rank].active]

    def oldest_generation(self) -> int:
        """The oldest one of which a communicator may still be built, or lives."""
        return min([self.generation, *(session.generation for session in self.active_sessions())])

    def replies_different(self) -> dict[int, int]:
        """Rank -> how many replayed values differ from what its program was given, in all its sessions."""
        counts: dict[int, int] = {}
        for ended in self.ended:
            counts[ended.rank] = counts.get(ended.rank, 0) + ended.replies_different
        for session in self.active_sessions():
            counts[session.rank] = counts.get(session.rank, 0) + session.log.replies_different
        return counts

    def device_of(self, rank: int) -> str:
        """Where it runs, or ran last; empty if it never did."""
        if rank in self.sessions:
            return self.sessions[rank].device
        return next((ended.status.device for ended in reversed(self.ended) if ended.rank == rank), "")

    def status(self) -> pb.JobStatus:
        """As `recoveryctl status` shows it; its ranks have answers of their own."""
        counts = counts_of(self.recoveries)
        return pb.JobStatus(
            name=self.name, faults=counts.recovered, given_up=counts.given_up, moves=counts.moves,
            validations=self.validations, last=counts.last, waits_for=self.waits_for,
            stage=self.progress.stage or "", stage_s=self.progress.in_stage_s,
            under_way_s=self.progress.under_way_s,
        )  # fmt: skip

    def note_recovery(self, recovery: pb.Recovery) -> None:
        """One that is over, whatever came of it: from here on it has a name.

        A drill that it is of has fired before it, whether or not anybody has looked since.
        """
        for session in self.active_sessions():
            self.note_fired(session)
        recovery.id, recovery.at_ms = new_id(), now_ms()
        self.recoveries.append(recovery)
        self.history.add(events.recovery_made(self.name, recovery))

    def note_adoption(self, adoption: pb.Adoption) -> None:
        """We have taken it over."""
        self.adoptions.append(adoption)
        self.history.add(events.adopted(adoption))

    def distrust_replay(self, message: str) -> None:
        """Replay was seen to give other bits: from now on only what needs none may be relied on."""
        self.not_replayable = self.not_replayable or message
        for session in self.active_sessions():
            session.note = f"not replayable, so no fault can be survived: {message}"

    def note_refused(self, sentence: str) -> None:
        """Why a session was not opened: its worker says so in the midst of what its launcher prints."""
        if sentence not in self.refused and len(self.refused) < MOST_REFUSED:
            self.refused.append(sentence)

    def fired(self, kind: str, rank: int) -> int:
        """How often that fault has been injected at a rank."""
        return sum(one.fired and (one.drill.kind, one.drill.rank) == (kind, rank) for one in self.drills)

    def arm(self, session: Session) -> None:
        """Write the drills for a session's rank that have not fired into its log."""
        for scheduled in self.drills:
            if scheduled.drill.rank == session.rank and not scheduled.fired and scheduled.drill.step:
                self.put(session, scheduled)

    def note_armed(self, session: Session) -> None:
        """Another host has written the drills for a rank into its log; those that came since follow."""
        free = {(kind, step, call): slot for slot, (kind, step, call, *_) in enumerate(session.log.drills())}
        for scheduled in self.drills:
            drill = scheduled.drill
            if drill.rank != session.rank or scheduled.fired or not drill.step:
                continue
            slot = free.pop((BY_NAME[drill.kind].number, drill.step, drill.call), -1)
            if slot < 0:
                self.put(session, scheduled)
            else:
                scheduled.slot = slot

    def put(self, session: Session, scheduled: ScheduledDrill) -> None:
        """Write a drill into the log of its rank."""
        drill = scheduled.drill
        scheduled.slot = len(session.log.drills())
        session.log.add_drill(BY_NAME[drill.kind].number, drill.step, drill.call)

    def note_fired(self, session: Session) -> None:
        """Take over from the log which drills fired; one that is ours to do did when it was done."""
        marks = session.log.drills()
        for scheduled in self.drills:
            if scheduled.drill.rank == session.rank and 0 <= scheduled.slot < len(marks):
                state = marks[scheduled.slot][3]
                ours = BY_NAME[scheduled.drill.kind].by_proxyd
                if state >= (DRILL_DONE if ours else DRILL_FIRED):
                    self.note_done(scheduled, session)

    def note_done(self, scheduled: ScheduledDrill, session: Session) -> None:
        """A drill was done, or is about to be."""
        if not scheduled.fired:
            scheduled.fired = True
            self.history.add(events.drill_told(self.name, scheduled.drill, session.log.step))

    def note_end(self, why: str, report: pb.JobReport) -> None:
        """Nothing of it runs any more, or what does has been given up."""
        for scheduled in self.drills:
            if not scheduled.fired:
                self.history.add(events.drill_told(self.name, scheduled.drill, 0, fired=False))
        orderly = {ended.rank: ended.clean for ended in self.ended} | dict.fromkeys(self.sessions, False)
        disorderly = [rank for rank, clean in orderly.items() if not clean]
        steps = max([report.steps, *(session.log.step for session in self.sessions.values())])
        self.history.add(events.job_ended(self.name, why, report, steps, disorderly))

    def remember(self, session: Session, clean: bool, state: str) -> None:
        """Keep what the report needs before the log goes; `state`: in which it is told of."""
        log = session.log
        self.note_fired(session)
        commits = log.commits()
        steps = commits[-1].step if commits else 0
        self.ended.append(
            Ended(
                rank=session.rank,
                clean=clean,
                steps=steps,
                calls_per_step=log.median_calls_per_step,
                bytes_per_step=log.median_bytes_per_step,
                replies_compared=log.replies_compared,
                replies_different=log.replies_different,
                recent_calls=tuple(log.recent_calls),
                status=session.status(state),
                automatic_commits=max(0, log.commit_count - steps),
                records=log.tail_index,
            )
        )

    def report(self) -> pb.JobReport:
        """The summary of sessions that ended; by rank, those of one rank in the order in which they ended."""

        for session in self.sessions.values():
            self.note_fired(session)

        def median(numbers: list[int]) -> int:
            return int(statistics.median(numbers)) if numbers else 0

        return pb.JobReport(
            steps=max((ended.steps for ended in self.ended), default=0),
            calls_per_step=median([ended.calls_per_step for ended in self.ended if ended.calls_per_step]),
            log_bytes_per_step=median([ended.bytes_per_step for ended in self.ended if ended.bytes_per_step]),
            recoveries=self.recoveries,
            faults=[pb.FaultOutcome(drill=s.drill.message(), fired=s.fired) for s in self.drills],
            ranks=sorted((ended.status for ended in self.ended), key=lambda status: status.rank),
            replies_compared=sum(ended.replies_compared for ended in self.ended),
            replies_different=sum(self.replies_different().values()),
            validations=self.validations,
            not_replayable=self.not_replayable,
            recent_calls=next((ended.recent_calls for ended in self.ended if ended.rank == 0), ()),
            adoptions=self.adoptions,
            automatic_commits=max((ended.automatic_commits for ended in self.ended), default=0),
            records=max((ended.records for ended in self.ended), default=0),
            refused=self.refused,
        )
