"""Jobs on several hosts, of one proxyd: who leads each, and what hosts ask each other about them."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import structlog

from understudy import replay
from understudy.recovery.agent.host_agent import HostAgent
from understudy.recovery.base.background import Complaints
from understudy.recovery.base.control import pb, rpc
from understudy.recovery.base.errors import Refused
from understudy.recovery.drills.spec import Drill
from understudy.recovery.history.report import drill_of
from understudy.recovery.host.placement import HostPlacement
from understudy.recovery.host.servers import ServerPool
from understudy.recovery.job_hosts.arrivals import Arrivals
from understudy.recovery.job_hosts.job_link import JobLinkService
from understudy.recovery.job_hosts.leading_host import LeadingHost
from understudy.recovery.job_hosts.migration import Migration
from understudy.recovery.machine.runtime_directory import RuntimeDirectory
from understudy.recovery.membership.job_leadership import Leading, NotLed, claim
from understudy.recovery.membership.membership import Membership
from understudy.recovery.membership.records import VERSION
from understudy.recovery.membership.stores.store import ClusterStoreError
from understudy.recovery.migration.places import Place
from understudy.recovery.migration.transfer.compatible import why_not
from understudy.recovery.migration.transfer.header import Here
from understudy.recovery.migration.transfer.moves import Callbacks, Moves
from understudy.recovery.planning.agreement import HostState
from understudy.recovery.planning.link_judgement import judge_links
from understudy.recovery.record.job_record import JobRecord
from understudy.recovery.record.log import RecordLog
from understudy.recovery.rendezvous.forwarder import Leader
from understudy.recovery.rendezvous.store import Store
from understudy.recovery.snapshots.settings import on_several_hosts
from understudy.recovery.snapshots.writing.part_writer import PartWriter
from understudy.recovery.snapshots.writing.request import Written
from understudy.recovery.spanning.far_moves import FarMoves
from understudy.recovery.spanning.leader.cpu_images import FOLDER, CpuImages
from understudy.recovery.spanning.leader.far_parts import FarParts
from understudy.recovery.spanning.leader.lead import Lead
from understudy.recovery.spanning.leader.lost_hosts import Handover
from understudy.recovery.spanning.leader.standbys import Lapse, Sources, Standbys
from understudy.recovery.spanning.member.deputy import Deputy
from understudy.recovery.spanning.member.kept_images import KeptImages
from understudy.recovery.spanning.member.leader_link import LeaderLink
from understudy.recovery.spanning.member.member import MemberSide, NotAdmitted
from understudy.recovery.spanning.member.member_parts import MemberParts
from understudy.recovery.spanning.member.succession import Succession
from understudy.recovery.spanning.placement import SpanningPlacement
from understudy.recovery.spanning.ranks.description import description
from understudy.recovery.spanning.ranks.mirror import Feed
from understudy.recovery.spanning.way_on import way_on
from understudy.recovery.state.jobs import Job, Session
from understudy.recovery.state.journaled_job import journaled_job
from understudy.recovery.state.span import Span

log = structlog.get_logger()

LOOK_S = 1.0
MOVE_S = 1500.0
UNLED_S = 15.0
"""Without a leader for so long, a member asks it."""
REPORT_S = 120.0
"""How long members can have the report of a job that is over."""


@dataclass(frozen=True)
class Led:
    """A job that this host leads, and that has ranks on others, or may come to."""

    lead: Lead
    placement: SpanningPlacement
    far_moves: FarMoves


class Spans:
    """Knows the jobs on several hosts of one proxyd."""

    def __init__(
        self,
        agent: HostAgent,
        pool: ServerPool,
        membership: Membership,
        runtime: RuntimeDirectory,
        host: Here,
    ) -> None:
        """`host`: what other hosts want to know of this one before a worker comes."""
        self._agent = agent
        self._pool = pool
        self._membership = membership
        self._runtime = runtime
        self._leader = LeaderLink(membership.links, agent.settings.gpu_ways)
        self._led: dict[str, Led] = {}
        self._handovers: dict[str, Handover] = {}
        """By jobs that we are about to lead on."""
        self._reports: dict[str, tuple[Span, pb.JobReport]] = {}
        settings = agent.settings
        stored = settings.persist.directory / FOLDER if settings.persist is not None else None
        self._images_folder = stored if settings.cpu_image_every_s else None
        arrivals = Arrivals(agent, self, membership.here)
        callbacks = Callbacks(arrived=arrivals.take_in, free_devices=arrivals.free_devices)
        self.moves = Moves(host, runtime.path, membership.links.to, callbacks, outputs=stored)
        self._migration = Migration(agent, pool, self.moves, membership.here)
        self._leading_host = LeadingHost(agent, self._migration, arrivals)
        self._member = MemberSide(
            agent.jobs, agent.deputies, settings, HostPlacement(pool, agent.leases), agent.follow,
            agent.remote_ranks.close_if_unused, agent.note, self._migration,
        )  # fmt: skip
        self._succession = Succession(
            membership.here, lambda: membership.store, membership.cluster, self._promote, self._store_of,
            settings.timing,
        )  # fmt: skip

    def add_to(self, server: grpc.aio.Server) -> None:
        """What other hosts may ask about their jobs and workers."""
        self.moves.add_to(server)
        rpc.add_JobLinkServicer_to_server(JobLinkService(self, self._member), server)

    async def run(self) -> None:
        """Look after hosts that are lost, until cancelled."""
        complaints = Complaints("hosts of jobs")
        while True:
            await asyncio.sleep(LOOK_S)
            with complaints.survived(self._membership.here):
                await self.look_at_hosts()

    async def look_at_hosts(self) -> None:
        """Once: whose loss would mean anything here, and who is lost."""
        away = self.moves.outgoing.hosts()
        members = any(led.lead.members for led in self._led.values())
        if not (away or members or self._agent.deputies):
            return
        standings, _ = await self._membership.hosts.standings()
        lost = {one.record.name: one.why for one in standings if one.state == HostState.LOST}
        alive = {one.record.name for one in standings if one.state == HostState.ALIVE}
        self._look_at_workers(away, lost, alive)
        for lead in [led.lead for led in self._led.values()]:
            for host in lost.keys() & lead.members.keys():
                lead.lost_hosts.give_up(host, lost[host])
        for name, deputy in list(self._agent.deputies.items()):
            job = self._agent.jobs.get(name)
            if job is None or job.span is None:
                continue
            why = ""
            if job.span.leader in lost:
                why = await self._why_over(job, deputy, lost)
            elif time.monotonic() - deputy.followed_at > UNLED_S:
                why = await self._leader.leads_no_more(job)
            for session in job.active_sessions() if why else []:
                session.fail(f"host {job.span.leader} leads job {job.name} no more: {why}")

    async def _why_over(self, job: Job, deputy: Deputy, lost: Mapping[str, str]) -> str:
        """Its leader is lost: what has become of it, or "" if it goes on."""
        assert job.span is not None
        leader = job.span.leader
        over = await self._succession.why_over(job, deputy, lost)
        return f"it is lost ({lost[leader]}), and {over}: {way_on(job)}" if over else ""

    async def _promote(self, job: Job, handover: Handover) -> Lead:
        self._handovers[job.name] = handover
        await self._agent.remote_ranks.promote(job)
        return self._led[job.name].lead

    def _give_way(self, job: Job, host: str) -> None:
        """Another host leads a job of ours: ours was given up, and its ranks go on elsewhere."""
        lead = self._led[job.name].lead
        lead.let_go_of_members(f"host {host} leads")
        lead.run_beside(self._agent.coordinators[job.name].cancel())  # what it waits for does not come
        for session in job.active_sessions():
            if session.host:  # it goes on, and nothing of what we know of it counts
                lead.worker_ended(session)
                continue
            session.fail(f"this host was given up: host {host} leads job {job.name} now, with this rank")
            # It has stood in its first collective since, and must never write to a file again.
            session.worker.send(signal.SIGKILL)

    def _look_at_workers(self, away: frozenset[str], lost: Mapping[str, str], alive: set[str]) -> None:
        """Whose relays are here, and who are not."""
        for host in away & lost.keys():
            self.moves.host_is_lost(host, f"host {host} is lost, and the worker with it ({lost[host]})")
        for host in away & alive:
            self.moves.outgoing.trust(host)

    # ------------------------------------------------------------------ stores of jobs
    def where(self, job: str) -> Leader | None:
        """Who leads it; None: this host.  Raises NoLink."""
        known = self._agent.jobs.get(job)
        if known is None or known.span is None or not known.span.leader:
            return None
        return Leader(known.span.leader, self._membership.links.to(known.span.leader))

    def spans(self, job: str) -> bool:
        """Whether it may have ranks on other hosts."""
        known = self._agent.jobs.get(job)
        return known is not None and known.span is not None

    def admits(self, job: str, host: str) -> str:
        """Empty if that host may use the stores of that job, and they are here; else why not."""
        lead = self._lead_of(job)
        if lead is None:
            return f"this host does not lead a job {job:.64}"
        return "" if host in lead.span.members else f"host {host:.64} takes no part in job {job:.64}"

    # ------------------------------------------------------------------ opening and closing
    async def open_job(self, request: pb.OpenJobRequest, drills: list[Drill]) -> str:
        """Answers the directory of its relays, if it is migratable; raises Refused."""
        name = request.job
        span = None if name in self._agent.jobs else await self.settle(name, request.hosts)
        if span is not None and span.leader:
            if drills:
                raise Refused(f"host {span.leader} leads job {name}: name its drills there")
            joined = await self._leader.join(name, span)
            drills = [drill_of(drill) for drill in joined.drills]
        try:
            return self._agent.open_job(name, drills, request.launcher_pid, request.migratable, span, self)
        except Refused:
            if span is not None and span.leading is not None:
                await span.leading.resign()
            raise

    async def settle(self, name: str, hosts: int) -> Span | None:
        """Who leads a job that is about to open; raises Refused."""
        if not self._membership.can_be_asked:
            if hosts <= 1:
                return None
            raise Refused(
                f"job {name} cannot span {hosts} hosts: start proxyd with --etcd, --listen and --certs"
            )
        try:
            claimed = await claim(
                self._membership.store, self._membership.cluster, name, self._membership.here, max(hosts, 1),
                timing=self._agent.settings.timing,
            )  # fmt: skip
        except NotLed as problem:
            raise Refused(str(problem)) from problem
        except ClusterStoreError as problem:
            if hosts <= 1:
                log.warning("this job will not leave this host", job=name, problem=str(problem))
                return None
            raise Refused(f"nobody can tell who leads job {name}: {problem}") from problem
        record = claimed.record
        if claimed.leadership is None:
            return Span(record.hosts, record.token, record.host)
        leading = Leading(
            self._membership.store, self._membership.cluster, name, record, claimed.leadership,
            self._agent.settings.timing,
        )  # fmt: skip
        return Span(record.hosts, record.token, leading=leading)

    def begin(self, job: Job) -> Lead:
        """We lead it; `start` is for when it is open here."""
        assert job.span is not None
        if job.span.leading is None:  # a proxyd before us led it
            store, cluster, here = self._membership.store, self._membership.cluster, self._membership.here
            record = pb.JobLeader(version=VERSION, host=here, hosts=job.span.hosts, token=job.span.token)
            job.span.leading = Leading(store, cluster, job.name, record, timing=self._agent.settings.timing)
        lead = Lead(
            job, job.span, self._membership.links, self._runtime, self._leading_host, self._membership.here,
            lambda sessions: placement.room_for(sessions), partial(self._give_way, job), self._imaging,
        )  # fmt: skip
        agent = self._agent
        placement = SpanningPlacement(self._pool, agent.leases, lead, self._places, self._cut_off)
        far_moves = FarMoves(
            job, placement, agent.coordinators, agent.planned.carry_out, self._leading_host.note
        )
        self._led[job.name] = Led(lead, placement, far_moves)
        return lead

    def _lead_of(self, job: str) -> Lead | None:
        """If this host leads it."""
        led = self._led.get(job)
        return led.lead if led is not None else None

    def _imaging(self, lead: Lead) -> tuple[CpuImages, Standbys] | None:
        """What takes images of a job's workers, and what has standbys keep them, if any are to be taken."""
        settings, job, leading = self._agent.settings, lead.job, lead.span.leading
        if self._images_folder is None or leading is None:
            return None
        records = RecordLog(self._membership.store, self._membership.cluster, job.name, lead.span.token)
        record = JobRecord(
            job.name, records, leading, partial(self._store_of, job), partial(self._known, job)
        )
        lapse = Lapse(
            lambda why: images.not_left(why), lambda: images.hurry(), lambda named: images.named(named)
        )
        standbys = Standbys(job, lead, record, Sources(self._migration.image, self._describe), lapse)
        images = CpuImages(
            job, lead, self.moves, self._images_folder, settings.cpu_image_every_s, standbys, settings.timing
        )
        if (handover := self._handovers.pop(job.name, None)) is not None:
            standbys.go_on(handover.recorded, handover.left.images)
        elif not leading.token:
            standbys.follow_predecessor(images.left.images if images.left is not None else None)
        return images, standbys

    def _describe(self, session: Session) -> pb.RankDescription:
        whole = Feed(session.log).whole(session.rank, anew=True)
        return description(session, self._agent.settings, whole, parked=False)

    def _known(self, job: Job) -> pb.JournaledJob:
        coordinator = self._agent.coordinators.get(job.name)
        return journaled_job(job, coordinator.corruption if coordinator is not None else None)

    async def settle_store(self, job: str) -> None:
        """As JobSpans."""
        lead = self._lead_of(job)
        if lead is not None and lead.standbys is not None:
            await lead.standbys.record.settle()

    def _store_of(self, job: Job) -> Store | None:
        """The store of a job's workers, on this host."""
        known = self._agent.worker_stores.get(job.name)
        return known.store if known is not None else None

    def images(self, job: Job) -> CpuImages | None:
        """Images of workers of a job that we lead, if any are to be taken."""
        return self._led[job.name].lead.images

    def placement(self, job: Job) -> HostPlacement:
        """For its coordinator."""
        return self._led[job.name].placement

    def _places(self, source: str) -> dict[str, int]:
        """Other hosts that live and fit a rank of that one, and how many free devices each has."""
        known, _ = self._membership.hosts.known()
        if source not in known:
            return {}
        return {
            name: sum(device.state in ("idle", "starting") for device in host.record.node.devices)
            for name, host in sorted(known.items())
            if host.lease and host.record.address and name != self._membership.here
            and not why_not(known[source].record, host.record)
        }  # fmt: skip

    async def _cut_off(self, hosts: list[str]) -> frozenset[str]:
        """Those of these that the others do not reach over the data network."""
        probe = self._membership.data_probe
        return judge_links(await probe.probe(hosts)) if probe is not None and len(hosts) > 1 else frozenset()

    async def move(self, session: Session, place: Place) -> str:
        """Take a rank to another host, or to any other; answers what was done, raises Refused."""
        job = session.job
        if job.span is None:
            raise Refused(
                f"job {job.name} stays on this host: to move its ranks, start proxyd with --etcd, --listen "
                "and --certs"
            )
        if not job.span.leader:
            return await self._led[job.name].far_moves.move(session, place)
        request = pb.AskMoveRequest(
            job=job.name, token=job.span.token, rank=session.rank, host=place.host, device=place.device
        )
        reply = await self._leader.ask(job.name, job.span, "AskMove", request, MOVE_S)
        return str(reply.detail)

    def came_here(self, session: Session, directory: Path, pid: int, relay: str) -> None:
        """As JobSpans."""
        self._led[session.job.name].lead.relocations.has_come_here(session, directory, pid, relay)

    async def move_for_member(self, lead: Lead, host: str, request: pb.AskMoveRequest) -> str:
        """Raises NotAdmitted, Refused."""
        session = lead.job.sessions.get(request.rank)
        if session is None or session.host != host:
            raise NotAdmitted(f"rank {request.rank} does not run on host {host:.64}")
        return await self._led[lead.job.name].far_moves.move(session, Place(request.host, request.device))

    def deputy(self, job: Job) -> Deputy:
        """In place of its coordinator."""
        persist = self._agent.settings.persist
        settings = on_several_hosts(persist) if persist is not None else None
        parts = MemberParts(job, settings, self._agent.controllers[job.name].run, self._agent.note)
        folder = self._images_folder / self._membership.here if self._images_folder is not None else None
        kept = KeptImages(job, folder, partial(self._store_of, job))
        return Deputy(job, self._agent.leases, self._agent.watch.pace, self._member.describe, parts, kept)

    def parts(self, job: Job, writer: PartWriter, take: Callable[[Written], None]) -> FarParts:
        """Who writes snapshots of its ranks."""
        return FarParts(self._led[job.name].lead, writer, take)

    async def close(self, job: Job) -> pb.JobReport | None:
        """Take leave of its leader, or of its members; a leader's report, if it gave one."""
        assert job.span is not None
        lead = self._lead_of(job.name)
        self._led.pop(job.name, None)
        self._succession.forget(job.name)
        if lead is not None:
            self._reports[job.name] = job.span, job.report()
            asyncio.get_running_loop().call_later(REPORT_S, self._reports.pop, job.name, None)
            await lead.close()
            return None
        return await self._leader.leave(job, job.span)

    async def ended(self, session: Session) -> None:
        """One of another host's."""
        lead = self._lead_of(session.job.name)
        if lead is not None:
            await lead.ended(session)

    async def stop(self) -> None:
        """proxyd stops."""
        for lead in [led.lead for led in self._led.values()]:
            await lead.close()

    # ------------------------------------------------------------------ ranks of a member
    async def begin_rank(self, job: Job, rank: int, world: int) -> pb.BeginRankReply:
        """Before it opens here; raises Refused."""
        assert job.span is not None
        return await self._leader.begin_rank(job.name, job.span, rank, world)

    async def end_rank(self, job: Job, rank: int, session: Session | None) -> None:
        """It has opened, or not; raises Refused."""
        assert job.span is not None
        opened = self._member.describe(session) if session is not None else None
        await self._leader.end_rank(job.name, job.span, rank, opened)

    # ------------------------------------------------------------------ what members ask
    def led(self, request: Any) -> Lead:
        """Raises NotAdmitted."""
        lead = self._lead_of(request.job)
        if lead is None:
            raise NotAdmitted(f"this host does not lead a job {request.job}")
        if not lead.span.admits(request.token):
            raise NotAdmitted("that is not the token of the job")
        return lead

    def report(self, request: pb.LeaveJobRequest) -> pb.JobReport:
        """Raises NotAdmitted."""
        span, report = self._reports.get(request.job, (None, None))
        if span is not None and report is not None and span.admits(request.token):
            return report
        return self.led(request).job.report()

    async def take_in(self, lead: Lead, host: str, request: pb.JoinJobRequest) -> pb.JoinJobReply:
        """A member."""
        if request.hosts != lead.span.hosts:
            raise NotAdmitted(
                f"job {lead.job.name} was started for {lead.span.hosts} hosts, not {request.hosts}"
            )
        for name, ours in self._agent.settings.gpu_ways.items():
            if (theirs := getattr(request, name)) != ours:
                raise NotAdmitted(
                    f"all hosts of a job need the same --{name}: it is {ours or 'for GPUs only'} here, and "
                    f"{theirs or 'for GPUs only'} on {host}"
                )
        if host not in lead.members and len(lead.span.members) + 1 >= lead.span.hosts:
            raise NotAdmitted(f"all {lead.span.hosts} hosts of job {lead.job.name} are there already")
        lead.join(host)
        self._agent.note()
        drills = [one.drill.message() for one in lead.job.drills if not one.fired]
        return pb.JoinJobReply(generation=lead.job.generation, drills=drills)

    async def let_begin(self, lead: Lead, host: str, request: pb.BeginRankRequest) -> pb.BeginRankReply:
        """Raises NotAdmitted."""
        if host not in lead.members:
            raise NotAdmitted("this host has not joined the job")
        try:
            await self._agent.remote_ranks.await_former(lead.job, request.rank, request.world, host)
        except Refused as refusal:
            raise NotAdmitted(str(refusal)) from refusal
        await lead.turns.begin(host, request.rank)
        return pb.BeginRankReply(
            generation=lead.job.generation, validate_step=self._agent.remote_ranks.next_validation(lead.job)
        )

    def let_end(self, lead: Lead, host: str, request: pb.EndRankRequest) -> pb.EndRankReply:
        """Raises NotAdmitted."""
        member = lead.members.get(host)
        if member is None:
            raise NotAdmitted("this host has not joined the job")
        try:
            if request.HasField("opened"):
                if (told := request.opened.rank) != request.rank:
                    raise NotAdmitted(f"it opened rank {request.rank}, and tells of rank {told}")
                lead.opened(member, request.opened)
        except replay.LogError as problem:
            raise NotAdmitted(f"its description makes no sense: {problem}") from problem
        finally:
            in_time = lead.turns.end(host, request.rank)
        if not in_time:
            raise NotAdmitted("opening the rank took too long")
        return pb.EndRankReply()
