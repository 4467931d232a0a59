"""Looks at every device server again and again: at shared memory and at /proc, never by asking the server."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping
from dataclasses import replace

import structlog

from understudy.recovery.agent_api.server import Pace, Server, Verdict, is_gpu
from understudy.recovery.base.background import Complaints
from understudy.recovery.host.injector import Injector
from understudy.recovery.job.coordinator import Coordinator
from understudy.recovery.machine.activity import Activity
from understudy.recovery.planning.collective_watch import BUSY_DEVICE_NS, CollectiveWatch, Member
from understudy.recovery.planning.progress import SECOND, SHORTEST_NS, STUCK_NS, Finding, Position, Progress
from understudy.recovery.spanning.member.deputy import Deputy
from understudy.recovery.state.jobs import Job, Session

log = structlog.get_logger()

PAUSE_S = 0.02
UNHEARD_NS = SECOND // 2
"""Without a word from a host for longer than this, nobody knows what its servers do (deputy.py)."""


class Watch:
    """Watches the device servers of all jobs of a proxyd."""

    def __init__(
        self,
        jobs: Mapping[str, Job],
        coordinators: Mapping[str, Coordinator],
        deputies: Mapping[str, Deputy],
        injector: Injector,
        hang_timeout_s: float,
    ) -> None:
        self._complaints = Complaints("watch")
        self._injector = injector
        self._jobs = jobs
        self._coordinators, self._deputies = coordinators, deputies
        self._hang_timeout_ns = int(hang_timeout_s * SECOND)
        self._servers: dict[Server, tuple[Activity, Progress]] = {}
        self._collectives: dict[str, CollectiveWatch] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._look_at_all()  # no job may be held while we sleep: it may be the last that is left of it
            await asyncio.sleep(PAUSE_S)

    def _look_at_all(self) -> None:
        now_ns = time.monotonic_ns()
        for name, job in list(self._jobs.items()):
            with self._complaints.survived(name):  # one job's log must not leave the others unwatched
                self._injector.act_on_fired(job)
                if (steered := self._coordinators.get(name) or self._deputies.get(name)) is not None:
                    self._look(job, steered, now_ns)
        self._forget()

    def pace(self, server: Server) -> Pace:
        """How fast a server is that we watch for another host, which leads its job."""
        if server not in self._servers:
            return Pace()
        return self._pace_here(server, time.monotonic_ns())

    def _look(self, job: Job, steered: Coordinator | Deputy, now_ns: int) -> None:
        """`steered`: who knows which of its servers stand still on purpose."""
        sessions = [session for session in job.active_sessions() if _watched(session)]
        for session in sessions:
            session.clock.look(session.log.step, now_ns)
            if session.host:
                continue  # its own proxyd looks
            _, progress = self._of(session.server)
            if steered.restoring or steered.stands(session):
                finding = progress.look_aside(now_ns)
            else:
                position = position_of(session)
                finding = progress.look(position, now_ns, session.doublings(position.record))
            if finding is not None:
                self._end(session, finding)
        if steered.restoring or len(sessions) < 2:
            if job.name in self._collectives:
                self._collectives[job.name].forget()
            return
        if (coordinator := self._coordinators.get(job.name)) is not None:  # who leads looks at them
            self._look_at_collectives(job, coordinator, sessions, now_ns)

    def _look_at_collectives(
        self, job: Job, coordinator: Coordinator, sessions: list[Session], now_ns: int
    ) -> None:
        if job.name not in self._collectives:
            shortest = BUSY_DEVICE_NS if sessions[0].on_gpu else SHORTEST_NS
            self._collectives[job.name] = CollectiveWatch(self._hang_timeout_ns, shortest)
        watch = self._collectives[job.name]
        if not watch.waiting and not any(session.log.in_collective for session in sessions):
            return
        members = {session.rank: self._member(session, now_ns) for session in sessions}
        hung = watch.look(members, now_ns)
        if hung is not None:
            coordinator.collective_hung(job.sessions[hung.rank], hung.since_ns, hung.evidence, hung.counts)

    def _member(self, session: Session, now_ns: int) -> Member:
        pace = self._pace(session, now_ns)
        waiting = bool(session.log.in_collective)
        uid = session.log.waits_for
        return Member(
            waits_for=(uid, session.log.wait_sequence) if waiting and uid != (0, 0) else None,
            started={(low, high): (done, size) for low, high, done, size in session.log.started()},
            quiet_since_ns=max(pace.quiet_since_ns, pace.moved_ns),
            stuck_outside=pace.stuck_ns >= STUCK_NS and not waiting,
        )

    def _pace(self, session: Session, now_ns: int) -> Pace:
        server = session.server
        if not server.host:
            return self._pace_here(server, now_ns)
        # What a host that has fallen silent told last may be over since: it is no evidence of a hang.
        unheard = now_ns - server.heard_ns > UNHEARD_NS
        return replace(server.pace, quiet_since_ns=now_ns) if unheard else server.pace

    def _pace_here(self, server: Server, now_ns: int) -> Pace:
        """A thread of NCCL's spins while a collective between hosts waits: what it burns is no work."""
        activity, progress = self._of(server)
        quiet_since_ns = activity.watched_since_ns if is_gpu(server.device) else activity.quiet_since_ns
        return Pace(quiet_since_ns, progress.stuck_ns(now_ns), progress.moved_ns())

    def _of(self, server: Server) -> tuple[Activity, Progress]:
        if server not in self._servers:
            activity = Activity(server.pid)
            self._servers[server] = activity, Progress(activity, self._hang_timeout_ns)
        return self._servers[server]

    def _end(self, session: Session, finding: Finding) -> None:
        """It counts as dead from here on; its pidfd tells the coordinator."""
        server, now_ns = session.server, time.monotonic_ns()
        log.warning("ending a device server", rank=session.rank, pid=server.pid, kind=finding.kind.value,
                    evidence=finding.evidence)  # fmt: skip
        if not finding.counts:
            session.note_alarm(session.log.cursor_index)
        server.verdict = Verdict(
            finding.kind, finding.happened_ns, now_ns, finding.evidence, counts=finding.counts
        )
        server.process.send(signal.SIGKILL)

    def _forget(self) -> None:
        for server in [server for server in self._servers if server.process.ended.is_set()]:
            del self._servers[server]
        for name in self._collectives.keys() - self._jobs.keys():
            del self._collectives[name]


def _watched(session: Session) -> bool:
    server = session.server
    return server.verdict is None and not server.retired and not server.process.ended.is_set()


def position_of(session: Session) -> Position:
    """Where a server stands.  The cursor is read first: what is appended meanwhile has not waited yet."""
    page = session.log
    cursor = page.cursor
    return Position(
        cursor=cursor, tail=page.tail, record=page.cursor_index, step=page.step,
        in_collective=bool(page.in_collective),
    )  # fmt: skip
