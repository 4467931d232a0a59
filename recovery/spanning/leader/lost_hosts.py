"""What becomes of a job's ranks when the host where they run is lost."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import structlog

from understudy.recovery.base.control import pb
from understudy.recovery.machine.processes import Watched
from understudy.recovery.planning.facts import FaultKind
from understudy.recovery.spanning.leader.attendance import Attendance
from understudy.recovery.spanning.leader.member_link import MemberLink
from understudy.recovery.spanning.ranks.remote import RemoteProcess
from understudy.recovery.spanning.way_on import way_on
from understudy.recovery.state.jobs import Session
from understudy.recovery.state.server import Verdict
from understudy.recovery.state.span import GivenUp

if TYPE_CHECKING:
    from understudy.recovery.spanning.leader.cpu_images import CpuImages
    from understudy.recovery.spanning.leader.lead import Lead

log = structlog.get_logger()

LOOK_S = 0.2


class LostHosts:
    """Gives up lost hosts of one job that we lead."""

    def __init__(self, lead: Lead, attendance: Attendance) -> None:
        self._lead = lead
        self._attendance = attendance
        self._expected = ""
        """The host that led the job before us, and is lost; not given up before all others have told."""

    def expect_loss(self, former: str) -> MemberLink:
        """We follow that host as its standby: it is lost, but who else is there is to be known first."""
        self._expected = former
        self._lead.span.members.add(former)
        member = self._lead.members[former] = MemberLink(self._lead, former)
        return member

    def give_up_expected(self, former: str, why: str) -> None:
        """All others have told of their ranks."""
        self._expected = ""
        self.give_up(former, why)
        self._lead.span.members.discard(former)

    def give_up(self, host: str, why: str) -> None:
        """It is lost: its ranks come back from images, or are lost too; nobody waits for it any more."""
        member = self._lead.members.get(host)
        if member is None or member.lost or host == self._expected:
            return
        member.lost = why
        member.connected.clear()
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
            assert isinstance(session.server.process, RemoteProcess)
            session.server.process.has_ended(time.monotonic_ns())
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
        for session in lost:
            evidence = f"host {host} is lost ({why})"
            happened, now = session.log.progress_ns, time.monotonic_ns()
            session.server.verdict = Verdict(FaultKind.HOST_LOST, happened, now, evidence, counts=False)
            session.server.retired = False
            self._lead.span.given_up.add(_worker(host, session.worker))
            self._lead.run_beside(self._await_return(session))

    async def leave_for_dead(self, host: str, pid: int) -> None:
        """It may have been let run there, and its rank goes on elsewhere: that host is lost.

        Until whoever leads the job after us knows it, too.
        """
        self._lead.span.given_up.add(GivenUp(host, pid))
        await self._lead.settle()

    async def _await_return(self, session: Session) -> None:
        """If its job is given up meanwhile, nobody tells us of the end of its worker, who is gone."""
        while session.restores_from_image and session.active:
            await asyncio.sleep(LOOK_S)
        if self.awaits(session):
            self._lead.worker_ended(session)

    def awaits(self, session: Session) -> bool:
        """Whether its worker is to come back from an image, and has not: its host may be back meanwhile."""
        return bool(session.restores_from_image) and self._given_up(_worker(session.host, session.worker))

    def _given_up(self, worker: GivenUp) -> bool:
        return any(one.covers(worker) for one in self._lead.span.given_up)

    def ends(self, member: MemberLink, one: pb.RankDescription) -> bool:
        """Whether that is a worker whose rank runs elsewhere by now: then it is ended.

        Its host was only cut off.  It has stood in its first collective since: its server meets nobody.
        """
        if not self._given_up(_worker(member.host, one.worker)):
            return False
        job = self._lead.job.name
        log.warning("a worker that was given up is ended", job=job, rank=one.rank, host=member.host)
        self._lead.sender(member, one.rank)(RemoteProcess(one.worker, lambda *_: None), signal.SIGKILL)
        return True

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


def _worker(host: str, process: Watched | pb.Process) -> GivenUp:
    return GivenUp(host, process.pid, process.start_ticks)
