"""What becomes of a job's ranks when the host where they run is lost."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from understudy import replay
from understudy.protos import control_pb2 as pb
from understudy.recovery.agent_api.server import Verdict
from understudy.recovery.planning.facts import FaultKind
from understudy.recovery.planning.takeover.workers import GivenUp, WorkerId, missing
from understudy.recovery.record.log import Recorded
from understudy.recovery.spanning.leader.attendance import Attendance
from understudy.recovery.spanning.leader.member_link import MemberLink
from understudy.recovery.spanning.ranks.image_set import Left
from understudy.recovery.spanning.way_on import way_on
from understudy.recovery.state.jobs import Session

if TYPE_CHECKING:
    from understudy.recovery.spanning.leader.cpu_images import CpuImages
    from understudy.recovery.spanning.leader.lead import Lead

log = structlog.get_logger()

LOOK_S = 0.2
BEFORE = "it was given up before whoever leads the job now began to"
UNIMAGED = "it had come there after the newest CPU images"
GONE = "its CPU image is gone with the proxyd that led the job"


@dataclass(frozen=True)
class Handover:
    """What the former leader of a job has left to us, its standby."""

    former: str
    recorded: Recorded
    left: Left
    """The images that its record names, and those of them that are here."""


class LostHosts:
    """Gives up lost hosts of one job that we lead."""

    def __init__(self, lead: Lead, attendance: Attendance) -> None:
        self._lead = lead
        self._attendance = attendance
        self._expected: dict[str, str] = {}
        """Hosts that were lost under a former leader, and why; not given up before all others have told."""
        self._left: Left | None = None
        """What that one has left, until all have told."""
        self._coming_back: dict[str, set[Session]] = {}
        """By hosts that were given up: their ranks that are to come back."""

    @property
    def expects_losses(self) -> bool:
        """Whether hosts are lost that are not given up yet, as others have not told of their ranks."""
        return bool(self._expected)

    # ------------------------------------------------------------------ of a former leader's time
    def take_over(self, handover: Handover, lost: Mapping[str, str]) -> None:
        """We lead the job of a host that is lost: its ranks come back from what it has left.

        `lost`: it, and others, and why: they may be lost since the images were taken, too.
        """
        lead, left = self._lead, handover.left
        try:
            if lead.images is not None:
                left = lead.images.take_over(left)
        except OSError as problem:
            log.error("nothing can come back from CPU images", job=lead.job.name, problem=str(problem))
        imaged = {one.host for one in left.images.workers}
        expected = {host: why for host, why in lost.items() if host == handover.former or host in imaged}
        self._go_on(left, expected)

    async def follow_predecessor(self) -> None:
        """A proxyd before us led the job from here: with what it has left, ranks are to come back.

        Ranks of this host are known by now: this runs before anything that begins when they are.
        """
        left = self._lead.images.take_left() if self._lead.images is not None else None
        if left is not None or self._lead.span.given_up_hosts:
            self._go_on(left, {})

    def _go_on(self, left: Left | None, lost: Mapping[str, str]) -> None:
        """Hosts that had been given up are so once more, unless they take part again, and tell of theirs."""
        self._left, span = left, self._lead.span
        expected = {**dict.fromkeys(span.given_up_hosts - span.members, BEFORE), **lost}
        for host in sorted(expected):
            self._expect_loss(host, expected[host])
        self._lead.run_beside(self._give_up_expected())

    def _expect_loss(self, host: str, why: str) -> None:
        """It is lost, and has not told of its ranks; but who else is there is to be known first.

        Its ranks are those that it had when the images were taken, unless others tell of them.
        """
        lead, left, self._expected[host] = self._lead, self._left, why
        lead.span.members.add(host)
        if (known := lead.members.get(host)) is not None:
            known.stop()
        member = lead.members[host] = MemberLink(lead, host)
        for told in left.described(host) if left is not None else ():
            there = lead.job.sessions.get(told.rank)
            if there is not None and lead.images is not None:
                lead.images.came_back(there)
            if there is not None or told.rank in lead.job.departed:
                continue  # it has gone elsewhere meanwhile, or has ended
            try:
                session = lead.described(member, told)
            except replay.LogError as problem:
                log.error("a rank cannot come back", job=lead.job.name, rank=told.rank, problem=str(problem))
                continue
            session.restores_from_image = left.images.serial if left is not None else 0
        self._attendance.told(host)  # nobody waits for it

    async def _give_up_expected(self) -> None:
        """Once all others have told of their ranks."""
        job = self._lead.job
        while self._lead.span.awaited:
            await asyncio.sleep(LOOK_S)
        expected, self._expected = self._expected, {}
        left, self._left = self._left, None
        for session in job.active_sessions():
            if session.host not in expected:
                session.restores_from_image = 0  # it had gone elsewhere meanwhile
        for host, why in expected.items():
            self.give_up(host, why)
            self._lead.span.members.discard(host)
        if left is not None and self._lead.images is not None:
            self._lead.images.hold()  # on ranks of which others have told since
        worlds = [session.world for session in job.sessions.values()]
        given_up = self._lead.span.given_up_hosts
        lost = expected or dict.fromkeys(sorted(given_up), BEFORE)
        given_up.intersection_update(self._coming_back)  # of the others nobody is to come back any more
        if lost and (gone := missing(worlds, job.sessions.keys(), job.departed.keys())):
            ranks = ", ".join(f"rank {rank}" for rank in gone)
            self.fail_all(lost, ranks, UNIMAGED if left is not None else GONE)
        self._lead.look_for_untold()

    # ------------------------------------------------------------------ any
    def give_up(self, host: str, why: str) -> None:
        """It is lost: its ranks come back from images, or are lost too; nobody waits for it any more."""
        member = self._lead.members.get(host)
        if member is None or member.lost or host in self._expected:
            return
        if self._left is not None and host in self._lead.span.awaited:
            return self._expect_loss(host, why)
        member.give_up(why)
        log.error("a host of a job is given up", job=self._lead.job.name, host=host, why=why)
        self._attendance.lost(host, why)
        member.heard.set()
        lost = [session for session in self._lead.of(member) if session.active]
        images = self._lead.images
        obstacle = self._try_images(images, lost) if lost and images is not None else ""
        if lost and images is not None and not obstacle:
            self._bring_back(host, lost, why)
        elif lost:
            ranks = ", ".join(f"rank {session.rank} in step {session.log.step}" for session in lost)
            self.fail_all({host: why}, ranks, obstacle)
            for session in lost:
                session.restores_from_image = 0
        for session in self._lead.of(member):
            session.server.process.hear_of_end()
            if not session.restores_from_image:
                self._lead.worker_ended(session)
        self.fail_missing()

    def _try_images(self, images: CpuImages, lost: Sequence[Session]) -> str:
        if not self._lead.room_for(lost):
            return "no other host of the cluster has a free device for it"
        return images.bring_back(lost)

    def _bring_back(self, host: str, lost: list[Session], why: str) -> None:
        """The end of their servers begins the recovery that does it."""
        self._lead.span.members.discard(host)
        self._lead.span.given_up_hosts.add(host)
        self._coming_back[host] = set(lost)
        for session in lost:
            evidence = f"host {host} is lost ({why})"
            happened, now = session.log.progress_ns, time.monotonic_ns()
            session.server.verdict = Verdict(FaultKind.HOST_LOST, happened, now, evidence, counts=False)
            session.server.retired = False
            self._lead.span.given_up.add(GivenUp(host, session.worker.pid, session.worker.start_ticks))
            self._lead.run_beside(self._await_return(session, host))

    async def leave_for_dead(self, host: str, pid: int) -> None:
        """It may have been let run there, and its rank goes on elsewhere: that host is lost.

        Until whoever leads the job after us knows it, too.
        """
        self._lead.span.given_up.add(GivenUp(host, pid))
        await self._lead.settle()

    async def _await_return(self, session: Session, host: str) -> None:
        """If its job is given up meanwhile, nobody tells us of the end of its worker, who is gone."""
        while session.restores_from_image and session.active:
            await asyncio.sleep(LOOK_S)
        self._coming_back[host].discard(session)
        if not self._coming_back[host]:
            self._lead.span.given_up_hosts.discard(host)
        if self.awaits(session):
            self._lead.worker_ended(session)

    def awaits(self, session: Session) -> bool:
        """Whether its worker is to come back from an image, and has not: its host may be back meanwhile."""
        worker = WorkerId(session.host, session.worker.pid, session.worker.start_ticks)
        given_up = any(one.covers(worker) for one in self._lead.span.given_up)
        return bool(session.restores_from_image) and given_up

    def end(self, member: MemberLink, one: pb.RankDescription) -> None:
        """A worker whose rank runs elsewhere by now: its host was only cut off.

        It has stood in its first collective since: its server meets nobody.
        """
        job = self._lead.job.name
        log.warning("a worker that was given up is ended", job=job, rank=one.rank, host=member.host)
        self._lead.sender(member, one.rank)(one.worker, signal.SIGKILL)

    def fail_missing(self) -> None:
        """Ranks of a former leader's time whose hosts never told of them."""
        ranks, hosts = self._attendance.missing()
        if ranks:
            self.fail_all(hosts, ", ".join(f"rank {rank}" for rank in ranks))

    def fail_all(self, hosts: Mapping[str, str], ranks: str, obstacle: str = "") -> None:
        """The job ends, with a sentence."""
        why = "; ".join([*hosts.values(), *filter(None, [obstacle])])
        lost = f"host {next(iter(hosts))} is" if len(hosts) == 1 else f"hosts {', '.join(hosts)} are"
        for session in self._lead.job.active_sessions():
            session.fail(
                f"{lost} lost, and with it the worker of {ranks}, which nothing can bring back ({why}): "
                f"{way_on(self._lead.job)}"
            )
