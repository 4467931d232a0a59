"""The leader's side of a job on several hosts: ranks of its members, as if they were here."""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any

import structlog

from understudy.protos import control_pb2 as pb
from understudy.recovery.agent_api.commands import NotDone
from understudy.recovery.agent_api.server import AbsentServer, Pace, Server, Verdict
from understudy.recovery.base.background import BackgroundTasks
from understudy.recovery.machine.processes import Watched
from understudy.recovery.machine.runtime_directory import RuntimeDirectory
from understudy.recovery.membership.network.links import Links
from understudy.recovery.planning.facts import FaultKind
from understudy.recovery.planning.takeover.notices import notice_of
from understudy.recovery.planning.takeover.reports import RankReport
from understudy.recovery.planning.takeover.workers import (
    Fate,
    GivenUp,
    KnownWorker,
    ToldWorker,
    WorkerId,
    fate_of,
    fate_of_ended,
    fate_untold,
)
from understudy.recovery.spanning.leader.attendance import Attendance
from understudy.recovery.spanning.leader.cpu_images import CpuImages
from understudy.recovery.spanning.leader.lost_hosts import LostHosts
from understudy.recovery.spanning.leader.member_link import MemberLink
from understudy.recovery.spanning.leader.own_host import OwnHost
from understudy.recovery.spanning.leader.relocations import ARRIVES_S, Relocations
from understudy.recovery.spanning.leader.standbys import Standbys
from understudy.recovery.spanning.leader.steering import Steering
from understudy.recovery.spanning.leader.turns import Turns
from understudy.recovery.spanning.ranks.mirror import Mirror
from understudy.recovery.spanning.ranks.remote import NoDeviceThere, RemoteProcess, RemoteServer, Send
from understudy.recovery.state.jobs import Job, Session
from understudy.recovery.state.journaled_job import take_departure
from understudy.recovery.state.span import Span
from understudy.recovery.state.taking_over import open_fault, report_of

log = structlog.get_logger()

ASK_S, REPLACE_S = 10.0, 90.0


class Lead:
    """Leads one job: knows its members, and what each tells of its ranks."""

    def __init__(
        self,
        job: Job,
        span: Span,
        links: Links,
        runtime: RuntimeDirectory,
        own_host: OwnHost,
        here: str,
        room_for: Callable[[Sequence[Session]], bool] = lambda _: False,
        superseded: Callable[[str], None] = lambda _: None,
        imaging: Callable[[Lead], tuple[CpuImages, Standbys] | None] = lambda _: None,
    ) -> None:
        """`here`: the name of this host; `room_for`: whether ranks of lost hosts find a device elsewhere.

        `superseded` is called with the name of the host that leads instead.  `imaging` makes what takes
        images of workers, and what has standbys keep them, if any are to be taken.
        """
        self.here = here
        self.job = job
        self.span = span
        self.links = links
        self._runtime = runtime
        self._own_host = own_host
        self.members: dict[str, MemberLink] = {}
        self.mirrors: dict[Session, Mirror] = {}
        self._background = BackgroundTasks(f"lead {job.name}")
        self.turns = Turns(job)
        self.steering = Steering(self)
        self._replacements = 0
        self.attendance = Attendance(job, span)
        self.room_for, self._superseded = room_for, superseded
        made = imaging(self)
        self.images = made[0] if made is not None else None
        self.standbys = made[1] if made is not None else None
        self.lost_hosts = LostHosts(self, self.attendance)
        self.relocations = Relocations(self, own_host)

    def start(self) -> None:
        """Go on with the members that are known."""
        for host in sorted(self.span.members):
            self.add(host)
        self._background.start(self.steering.pass_orders_on())
        assert self.span.leading is not None
        if not self.span.leading.token:  # nobody has claimed it anew
            self.run_beside(self.lost_hosts.follow_predecessor())
        self._background.start(self.span.leading.run(self._superseded))
        if self.standbys is not None:
            self._background.start(self.standbys.run())

    async def settle(self) -> None:
        """Before anything is done that was decided: whoever leads the job after us knows of it."""
        self._own_host.note()
        if self.standbys is not None:
            await self.standbys.record.settle_known()

    def credentials(self) -> dict[str, Any]:
        """What every request to a member carries."""
        assert self.span.leading is not None
        return {"job": self.job.name, "token": self.span.token, "leadership": self.span.leading.token}

    def add(self, host: str) -> None:
        """It takes part, or does again."""
        if host not in self.members or self.members[host].lost:
            self.span.members.add(host)
            link = self.members[host] = MemberLink(self, host)
            link.begin(self._background)
        self.members[host].hurry.set()

    def join(self, host: str) -> None:
        """It is to open ranks."""
        self.relocations.takes_part(host)
        self.add(host)

    def let_go(self, member: MemberLink) -> None:
        """Nobody of the job is there, nor is to come."""
        self.span.members.discard(member.host)
        del self.members[member.host]
        member.stop()
        self._own_host.note()

    def let_go_of_members(self, why: str) -> None:
        """They follow somebody else; whatever we still had for them must not reach them."""
        for member in self.members.values():
            member.give_up(why)
            member.stop()

    def run_beside(self, work: Coroutine[None, None, None]) -> None:
        """As long as we lead."""
        self._background.start(work)

    async def close(self) -> None:
        """The job is over."""
        await self._background.cancel()
        if self.images is not None:
            self.images.close()
        self.turns.close()
        if self.standbys is not None:
            self.standbys.close()
        if self.span.leading is not None:
            await self.span.leading.resign()

    # ------------------------------------------------------------------ what members tell
    def take(self, member: MemberLink, news: pb.MemberNews) -> None:
        """Raises LogError."""
        if news.whole:
            member.reports.clear()
            for session in self.of(member):
                if session.rank not in news.present and session.rank not in member.opened:
                    self._not_there(session)
        for one in news.described:
            fate = self._fate(member, one, self.span.given_up)
            if fate is Fate.SUPERSEDED:
                self.lost_hosts.end(member, one)
                continue
            session = self._settle(fate, member, one)
            # What a leader before us had begun, unless we are at it: nobody else gets it to go on.
            member.reports[one.rank] = RankReport(
                one.rank, holds_state=one.holds_state, parked=one.parked, in_hand=session.rolling
            )
        self._apply(member, news)
        for departed in news.departed:
            if departed.departure.rank in self.span.remote_ranks:
                take_departure(self.job, departed)
        if news.complete:
            self._tell_of_faults(member, news)
            self._has_told(member)
        else:
            self._tell(member, news.faults)
        now_ns = time.monotonic_ns()
        for session in self.of(member):
            session.server.heard_ns = now_ns

    def _tell_of_faults(self, member: MemberLink, news: pb.MemberNews) -> None:
        """What befell ranks there before we followed them; the ends of device servers are told already."""
        faults = {fault.rank: fault for fault in news.faults if fault.job == self.job.name}
        for rank, report in member.reports.items():
            session = self._session(member, rank)
            if session is None:
                continue
            whole = replace(
                report, server_runs=session.server.process.running, active=session.active,
                fault=open_fault(faults.get(rank)), fault_in_hand=faults.get(rank) == member.faults.get(rank),
            )  # fmt: skip
            if (notice := notice_of(whole)) is not None:
                self._own_host.tell(report_of(notice, session))
        member.told_all(faults)

    def _not_there(self, session: Session) -> None:
        """Its worker ended unheard, or went to another host by a move that nobody heard the end of."""
        if fate_untold(self._known(session)) is Fate.AWAITED:
            later = asyncio.get_running_loop().call_later
            later(ARRIVES_S, self._ended_unless_found, session, session.worker)
        else:
            self.worker_ended(session)

    def _ended_unless_found(self, session: Session, worker: Watched) -> None:
        if session.worker is worker:
            self.worker_ended(session)

    def _has_told(self, member: MemberLink) -> None:
        member.heard.set()
        self.attendance.told(member.host)
        self.look_for_untold()
        self._own_host.note()
        self.lost_hosts.fail_missing()

    def look_for_untold(self) -> None:
        """Who of a former leader's time has ended, once all hosts have told that are not lost."""
        if not self.lost_hosts.expects_losses:
            self.attendance.look_for_untold(ARRIVES_S)

    def _apply(self, member: MemberLink, news: pb.MemberNews) -> None:
        for one in news.ranks:
            session = self._session(member, one.rank)
            if session is not None:
                self.took(session, one)
        for end in news.servers_ended:
            session = self._session(member, end.rank)
            if session is not None:
                self._server_ended(session, end)
        for left in news.workers_ended:
            session = self._session(member, left.rank)
            if left.HasField("last"):
                self._ended_unheard(member, left.last)
            elif session is not None and _same(session.worker, left.worker):
                self.worker_ended(session)

    def _tell(self, member: MemberLink, faults: Iterable[pb.FaultReport]) -> None:
        for fault in faults:
            if self._session(member, fault.rank) is not None and fault.job == self.job.name:
                member.faults[fault.rank] = fault
                self._own_host.tell(fault)

    def _ended_unheard(self, member: MemberLink, last: pb.RankDescription) -> None:
        """The newest end of a rank there: while nobody followed, or of a former leader's time."""
        session, worker = self.job.sessions.get(last.rank), _id(member.host, last.worker)
        known = self._known(session) if session is not None else None
        fate = fate_of_ended(worker, known, last.rank in self.job.departed)
        if fate is Fate.BEGAN:
            self.worker_ended(self._open(member, last))
        elif fate is Fate.ENDED and session is not None:
            if _same(session.worker, last.worker):
                self.mirrors[session].describe_anew(last)
            self.worker_ended(session)

    def took(self, session: Session, news: pb.RankNews) -> None:
        """From the host where it runs; raises LogError."""
        mirror, server = self.mirrors[session], session.server
        mirror.apply(news)
        if news.migratable:
            session.obstacles = () if news.migratable == "yes" else (news.migratable[:300],)
        if news.moved_ns | news.quiet_since_ns | news.stuck_ns:
            server.pace = Pace(
                quiet_since_ns=mirror.here_ns(news.quiet_since_ns) if news.quiet_since_ns else 0,
                stuck_ns=news.stuck_ns,
                moved_ns=mirror.here_ns(news.moved_ns) if news.moved_ns else 0,
            )

    def _server_ended(self, session: Session, end: pb.ServerEnd) -> None:
        mirror = self.mirrors[session]
        for server in (session.server, session.source_server):
            if server is None or not _same(server.process, end.server):
                continue
            if end.verdict and server.verdict is None:
                server.verdict = Verdict(
                    FaultKind(end.verdict), mirror.here_ns(end.happened_ns), mirror.here_ns(end.noticed_ns),
                    end.evidence, counts=end.counts,
                )  # fmt: skip
            if end.killed_ns and server is session.server and not session.killed_ns:
                session.killed_ns = mirror.here_ns(end.killed_ns)
            server.process.hear_of_end(mirror.here_ns(end.noticed_ns))

    def worker_ended(self, session: Session) -> None:
        """We are told, or know better than to wait for it."""
        session.worker.hear_of_end()

    def gone(self, member: MemberLink) -> None:
        """It knows nothing of the job: its ranks have ended."""
        for session in self.of(member):
            self._not_there(session)
        self._has_told(member)

    def opened(self, member: MemberLink, one: pb.RankDescription) -> None:
        """A rank there, which says so itself; raises LogError."""
        self.described(member, one)
        member.opened.add(one.rank)

    def described(self, member: MemberLink, one: pb.RankDescription) -> Session:
        """A rank there, new or known; raises LogError."""
        return self._settle(self._fate(member, one), member, one)

    def _known(self, session: Session) -> KnownWorker:
        worker = _id(session.host, session.worker)
        return KnownWorker(worker, session.active, self.relocations.may_arrive(session.rank))

    def _fate(self, member: MemberLink, one: pb.RankDescription, given_up: Iterable[GivenUp] = ()) -> Fate:
        session = self.job.sessions.get(one.rank)
        known = self._known(session) if session is not None else None
        told = ToldWorker(_id(member.host, one.worker), one.leaving)
        return fate_of(told, known, self.relocations.awaited_at(one.rank), given_up)

    def _settle(self, fate: Fate, member: MemberLink, one: pb.RankDescription) -> Session:
        """Raises LogError."""
        if fate is Fate.ARRIVED:
            return self.relocations.arrived(one)
        if fate is Fate.BEGAN:
            if (former := self._session(member, one.rank)) is not None:
                self.worker_ended(former)
            if not one.leaving:  # nor does it go by an order of a leader before us: none is taken any more
                self.span.astray.discard(one.rank)
            return self._open(member, one)
        session = self.job.sessions[one.rank]
        if fate is Fate.MOVED:
            self.relocations.has_come_there(session, member, one)
        if fate is Fate.GOES_ON:
            self._describe_anew(session, one)
        return session

    def _describe_anew(self, session: Session, one: pb.RankDescription) -> None:
        self.mirrors[session].describe_anew(one)
        server = session.server
        if not _same(server.process, one.server) and not server.retired:
            # Its proxyd has started anew meanwhile, and ended that one.
            server.process.hear_of_end()

    def _open(self, member: MemberLink, one: pb.RankDescription) -> Session:
        directory = self._runtime.rank_directory(self.job.name, one.rank, self.job.openings)
        self.job.openings += 1
        mirror = Mirror(directory, one)
        session = Session(
            job=self.job, rank=one.rank, world=one.world, device=one.device, device_index=one.device_index,
            asked_index=one.asked_index, threads=one.threads, directory=mirror.directory, log=mirror.log,
            worker=RemoteProcess(one.worker, self.sender(member, one.rank)),
            server=self._server(member, one.rank, one), generation=one.generation, relay=one.relay,
            host=member.host, lacks_state=not one.holds_state, restored_commit=one.restored_commit,
            resumed_commit=one.resumed_commit,
            state="lost" if one.lost else "running",
        )  # fmt: skip
        session.server.generation, session.server.suspect = one.generation, one.suspect
        if not one.server.pid:
            session.server.process.hear_of_end()  # it had just come there: as good as one that died
        self.mirrors[session] = mirror
        self._own_host.take_remote(session)
        return session

    def _server(
        self, member: MemberLink, rank: int, told: pb.RankDescription | pb.ReplaceServerReply
    ) -> RemoteServer:
        process = RemoteProcess(told.server, self.sender(member, rank))
        execute = self.steering.execute
        return RemoteServer(member.host, process, told.device, told.socket, told.data_address, execute)

    def _session(self, member: MemberLink, rank: int) -> Session | None:
        session = self.job.sessions.get(rank)
        return session if session is not None and session.host == member.host else None

    def of(self, member: MemberLink) -> list[Session]:
        """Ranks there."""
        return [session for session in self.job.sessions.values() if session.host == member.host]

    async def ended(self, session: Session) -> None:
        """A rank of another host: its worker may still have to hear why."""
        if session.host in self.members and self.members[session.host].connected.is_set():
            try:
                await self.steering.flush(session)
            except NotDone as problem:
                log.debug("a host was not told of an end", host=session.host, problem=str(problem))
        self.drop_mirror(session)

    # ------------------------------------------------------------------ ranks have moved
    def settle_at(self, session: Session, member: MemberLink, one: pb.RankDescription) -> None:
        """Our session of a rank that has come there; raises LogError."""
        directory = self._runtime.rank_directory(self.job.name, one.rank, self.job.openings)
        self.job.openings += 1
        mirror = Mirror(directory, one)
        if session.host:
            self.drop_mirror(session)
        else:
            self._own_host.leaves_here(session)
        self.mirrors[session] = mirror
        session.host, session.log, session.directory = member.host, mirror.log, mirror.directory
        session.device, session.device_index, session.relay = one.device, one.device_index, one.relay
        session.worker = RemoteProcess(one.worker, self.sender(member, one.rank))
        session.server, session.lacks_state = AbsentServer(one.device), True
        session.resumed_commit = max(session.resumed_commit, one.resumed_commit)

    def drop_mirror(self, session: Session) -> None:
        """Its rank does not run at that host any more."""
        mirror = self.mirrors.pop(session, None)
        if mirror is not None:
            shutil.rmtree(mirror.directory, ignore_errors=True)

    # ------------------------------------------------------------------ what members are told
    async def replace(self, session: Session, keep_source: bool) -> RemoteServer:
        """Another server for its rank; raises NotDone."""
        member = self.members[session.host]
        former = session.server
        former.retired = True
        self._replacements += 1
        request = pb.ReplaceServerRequest(
            rank=session.rank, stash=keep_source, number=self._replacements, former=former.process.message(),
            **self.credentials(),
        )  # fmt: skip
        reply = await member.ask("ReplaceServer", request, REPLACE_S)
        if reply.error:
            raise (NoDeviceThere if reply.homeless else NotDone)(reply.error)
        if keep_source:
            session.source_server = former
        else:
            former.process.hear_of_end()
        session.device, session.device_index = reply.device, reply.device_index
        return self._server(member, session.rank, reply)

    def end_server(self, session: Session, server: Server) -> None:
        """Without waiting."""
        server.retired = True
        process = server.process.message()
        request = pb.EndServerRequest(rank=session.rank, server=process, **self.credentials())
        self._background.start(self._try(server.host, "EndServer", request))

    def sender(self, member: MemberLink, rank: int) -> Send:
        """Sends signals to processes there."""

        def send(process: pb.Process, number: signal.Signals) -> None:
            request = pb.SignalRankRequest(
                rank=rank, process=process, number=int(number), **self.credentials()
            )
            self._background.start(self._try(member.host, "SignalRank", request))

        return send

    async def _try(self, host: str, method: str, request: Any) -> None:
        try:
            await self.members[host].ask(method, request, ASK_S)
        except NotDone as problem:
            log.warning("a host did not do as it was told", job=self.job.name, host=host, what=method,
                        problem=str(problem))  # fmt: skip


def _id(host: str, process: Watched | pb.Process) -> WorkerId:
    return WorkerId(host, process.pid, process.start_ticks)


def _same(process: Any, told: pb.Process) -> bool:
    return (process.pid, process.start_ticks) == (told.pid, told.start_ticks)
