"""Takes over the jobs of a proxyd that died: its device servers have gone on with their logs all the while.

The journal says what there was; processes, logs and the servers themselves say what is there now.  What has
been missed meanwhile (a death, a failed call, a recovery that was cut short) is told to the job's
coordinator, which then does as it always does.  Nothing is signalled but what listens at a device server's
socket in the journal's own directory, or was started for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from understudy import replay
from understudy.protos import control_pb2 as pb
from understudy.recovery.agent.host_agent import HostAgent
from understudy.recovery.agent_api.commands import NotDone
from understudy.recovery.agent_api.server import AbsentServer, Server, Verdict
from understudy.recovery.base.own_modules import name_of
from understudy.recovery.host.local_server import LocalServer
from understudy.recovery.host.servers import ServerPool
from understudy.recovery.job.coordinator import Coordinator
from understudy.recovery.machine.activity import process_state
from understudy.recovery.machine.processes import Watched, start_ticks
from understudy.recovery.machine.socket_path import listening_pid
from understudy.recovery.planning.facts import FaultKind
from understudy.recovery.planning.takeover.histories import History
from understudy.recovery.planning.takeover.reports import RankReport
from understudy.recovery.planning.takeover.servers import ServerReport, serving
from understudy.recovery.planning.takeover.takeover import takeover
from understudy.recovery.spanning.interface import JobSpans
from understudy.recovery.state.jobs import Job, Session
from understudy.recovery.state.journaled_job import (
    history_of,
    restored_durable,
    restored_job,
    take_history,
)
from understudy.recovery.state.taking_over import open_fault
from understudy.recovery.takeover.journal import last_touched
from understudy.recovery.takeover.leftovers import Leftovers

log = structlog.get_logger()


@dataclass(frozen=True)
class Found:
    """A device server of the journal.  `account`: what it said, if it holds the state of its rank."""

    server: Server
    account: pb.AdoptReply | None
    newest_generation: int = 0
    half_prepared: bool = False


@dataclass(frozen=True)
class Taken:
    """A session of the journal, and what its server said."""

    session: Session
    account: pb.AdoptReply | None
    newest_generation: int
    half_prepared: bool
    """Of its servers, one that was ended for that."""

    @property
    def active(self) -> bool:
        """Whether its program goes on."""
        return self.session.active and self.session.worker.running


class Successor:
    """Puts what a predecessor left in the agent."""

    def __init__(self, leftovers: Leftovers, agent: HostAgent, pool: ServerPool, spans: JobSpans) -> None:
        self._runtime = leftovers.runtime.path
        self._journal = leftovers.journal
        self._agent = agent
        self._pool = pool
        self._spans = spans
        self._away_since = last_touched(self._runtime)
        self._asked: set[tuple[int, int]] = set()

    async def adopt(self) -> None:
        """All jobs; nobody else has begun to use the agent."""
        self._agent.leases.fenced.update(self._journal.fenced)
        self._agent.leases.worn.update(self._journal.worn)
        self._agent.leases.draining.update(self._journal.draining)
        taken = [await self._take_job(job) for job in self._journal.jobs]
        for written in self._journal.servers:  # spares, and those that were being started: they have no state
            if (written.process.pid, written.process.start_ticks) not in self._asked:
                self._pool.retire(self._known(written))
        for job, sessions in taken:
            self._install(job, sessions)

    # ------------------------------------------------------------------ what is there
    async def _take_job(self, written: pb.JournaledJob) -> tuple[Job, list[Taken]]:
        job = restored_job(written, self._agent.history)
        self._remove_strays(written)
        found = await asyncio.gather(*(self._take_session(job, session) for session in written.sessions))
        return job, [one for one in found if one is not None]

    def _remove_strays(self, written: pb.JournaledJob) -> None:
        """Logs that were being made or removed when proxyd died: their workers ask again, or have ended."""
        known = {Path(session.directory).name for session in written.sessions}
        for path in (self._runtime / written.name).glob("rank-*"):
            if path.name not in known:
                shutil.rmtree(path, ignore_errors=True)

    async def _take_session(self, job: Job, written: pb.JournaledSession) -> Taken | None:
        device = self._agent.settings.devices.names[written.device_index]
        directory = self._runtime / job.name / written.directory
        candidates = [getattr(written, name) for name in ("server", "stash") if written.HasField(name)]
        found = await asyncio.gather(*(self._ask(server, job.name, written.rank) for server in candidates))
        found = found or [Found(AbsentServer(device), None)]  # it had just come from another host
        newest = max(one.newest_generation for one in found)
        serves = serving([ServerReport(one.server.process.running, one.account is not None) for one in found])
        chosen = found[serves.index]
        for other in found:
            if other is not chosen:
                self._pool.retire(other.server)
        try:
            opened = replay.Log(str(directory))
        except replay.LogError as problem:
            log.error("a session cannot be adopted", job=job.name, rank=written.rank, problem=str(problem))
            self._pool.retire(chosen.server)
            self._agent.leases.tell_pool(written.device_index)
            job.note_refused(f"rank {written.rank} was ended when proxyd was started anew: {problem}")
            job.departed[written.rank] = False  # nobody can run its collectives again
            worker = Watched.of(written.worker.pid, written.worker.start_ticks)
            if _has_mapped(worker.pid, directory):  # it would wait for ever in what nobody finds any more
                worker.send(signal.SIGKILL)
            worker.close()
            return None
        account = chosen.account
        session = Session(
            job=job, rank=written.rank, world=written.world, device=device, device_index=written.device_index,
            asked_index=written.asked_index, threads=written.threads, directory=directory, log=opened,
            worker=Watched.of(written.worker.pid, written.worker.start_ticks), server=chosen.server,
            state="lost" if written.lost else "running", recoveries=written.recoveries, note=written.note,
            generation=written.generation if account is None else account.generation,
            lacks_state=account is None,
            restored_commit=0 if account is None else account.restored_commit,
            resumed_commit=written.resumed_commit if account is None else account.restored_commit,
            drills_seen=set(written.drills_seen), durable=[restored_durable(one) for one in written.durable],
            mirrored_step=written.mirrored_step, relay=written.relay,
            destination=written.destination if written.HasField("destination") else None,
        )  # fmt: skip
        session.server.suspect = serves.suspect
        session.server.generation = job.generation if account is None else account.attached_generation
        return Taken(session, account, newest, account is None and any(one.half_prepared for one in found))

    def _known(self, written: pb.JournaledServer) -> LocalServer:
        """A server of the journal; as ended if there is no such process, or it is none of ours."""
        process, socket = written.process, self._runtime / written.socket
        self._asked.add((process.pid, process.start_ticks))
        watched = Watched.of(process.pid, process.start_ticks)
        ours = listening_pid(socket) == process.pid or started_for(process.pid, self._runtime)
        if watched.running and not ours:
            watched.close()
            watched = Watched.gone(process.pid, process.start_ticks)
        server = LocalServer(watched, socket, written.device, data_address=written.data_address)
        self._pool.adopt(server)
        return server

    async def _ask(self, written: pb.JournaledServer, job: str, rank: int) -> Found:
        """One that cannot be used is ended, and why is remembered."""
        server = self._known(written)
        if not server.process.running:
            return Found(server, None)
        state = process_state(server.pid)
        if state is not None and state.stopped:
            await _end(server, FaultKind.SERVER_STOPPED, "it was stopped by a signal when proxyd came back")
            return Found(server, None)
        ourselves = pb.Process(pid=os.getpid(), start_ticks=start_ticks(os.getpid()))
        try:
            reply = await server.execute_once_ready(pb.AdoptRequest(proxyd=ourselves))
        except NotDone as problem:
            why = f"it did not answer when proxyd came back: {problem}"
            await _end(server, FaultKind.SERVER_HUNG, why)
            return Found(server, None)
        if reply.job != job or reply.rank != rank or not reply.holds_state:
            await _end(server, FaultKind.SERVER_DIED, "it was only half prepared when proxyd died")
            return Found(server, None, reply.newest_generation, half_prepared=True)
        return Found(server, reply, reply.newest_generation)

    # ------------------------------------------------------------------ what is done
    def _install(self, job: Job, taken: Sequence[Taken]) -> None:
        """Without a pause: from here on everybody else may look at the job."""
        if job.corruption is not None:
            self._agent.run_beside(self._agent.remote_ranks.go_on_repairing(job))
        active = [one for one in taken if one.active]
        found = takeover(history_of(job), History(), [_report(one) for one in taken])
        take_history(job, found.history)
        adoption = pb.Adoption(
            job=job.name, at_ms=int(time.time() * 1000), away_s=max(0.0, time.time() - self._away_since),
            former_pid=self._journal.proxyd.pid, pid=os.getpid(), ranks=len(active),
            servers_lost=sum(one.account is None for one in active),
            recovery_redone=found.history.under_way,
        )  # fmt: skip
        for one in taken:
            one.session.log.supervise(os.getpid(), start_ticks(os.getpid()))
            one.session.log.snapshot_suspended = False  # whoever suspended them finds out again why
            job.note_fired(one.session)
        job.note_adoption(adoption)
        self._agent.adopt(job, [one.session for one in taken], self._spans)
        log.warning(
            "adopted", job=job.name, former=adoption.former_pid, away_s=round(adoption.away_s, 3),
            ranks=adoption.ranks, servers_lost=adoption.servers_lost,
            recovery_redone=adoption.recovery_redone,
        )  # fmt: skip
        coordinator, deputy = self._agent.coordinators.get(job.name), self._agent.deputies.get(job.name)
        for one in taken:
            self._go_on_moving(one, coordinator if adoption.recovery_redone else None)
        for one in active:
            if one.account is not None and deputy is not None:
                deputy.adopted(one.session, one.account)
        if coordinator is not None:
            self._agent.remote_ranks.tell_all(job, found.notices)

    def _go_on_moving(self, taken: Taken, restorer: Coordinator | None) -> None:
        """To the device where somebody wanted a rank: at once, with `restorer`, if a recovery is due."""
        session = taken.session
        leases = self._agent.leases
        if session.destination is None:
            if session.device_index in leases.draining:  # between two tries
                leases.undrain(session.device_index)
            return
        name = leases.name(session.destination)
        if taken.account is not None and session.server.device == name:  # it has its state there
            leases.arrive(session)
        elif session.active:
            if restorer is not None:
                restorer.move(session)
            self._agent.run_beside(self._agent.planned.go_on(session))
        else:
            session.destination = None


def _has_mapped(pid: int, directory: Path) -> bool:
    """Whether a process has files of a directory that may be gone."""
    with contextlib.suppress(OSError):
        return f"{directory}/" in Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape")
    return False


def _report(taken: Taken) -> RankReport:
    """What there is of its rank, as whoever recovers the job is to know it."""
    session, account = taken.session, taken.account
    return RankReport(
        session.rank, session.server.process.running, session.has_state,
        parked=account is not None and account.parked,
        fault=open_fault(account.fault) if account is not None else None,
        half_prepared=taken.half_prepared, newest_generation=taken.newest_generation, active=taken.active,
    )  # fmt: skip


def started_for(pid: int, runtime: Path) -> bool:
    """Whether a process is a device server, a fork of a spawner, with this runtime directory."""
    try:
        words = set(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"))
    except OSError:
        return False
    return {os.fsencode(name_of("proxy_server.spawner")), os.fsencode(runtime)} <= words


async def _end(server: Server, kind: FaultKind, evidence: str) -> None:
    """Until it has ended: what befell several ranks is noticed together."""
    now = time.monotonic_ns()
    server.verdict = Verdict(kind, now, now, evidence, counts=False)
    await server.process.end(0.0)
