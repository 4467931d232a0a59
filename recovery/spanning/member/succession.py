"""A job whose leading host is lost goes on under its standby: the host that the leader had named.

The standby claims the job in the cluster's store, which lets it only while it is named there and the lost
leader's lease is gone.  It makes the job its own, waits until all other members have described their ranks
to it, and gives the lost host up then, as any leader does: the ranks that were there come back from the
images that it was left.  The other members wait for it, and learn from whom they are followed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING

import structlog

from understudy import replay
from understudy.recovery.base.control import pb
from understudy.recovery.base.timing import TIMING, Timing
from understudy.recovery.membership.election import Leadership
from understudy.recovery.membership.job_leadership import (
    Leading,
    NotLed,
    claim,
    claim_as_standby,
    standby_key_of,
)
from understudy.recovery.membership.records import VERSION, BadRecord, read, written
from understudy.recovery.membership.stores.store import ClusterStore, ClusterStoreError, Entry
from understudy.recovery.spanning.member.deputy import Deputy
from understudy.recovery.spanning.member.standby_state import StandbyState
from understudy.recovery.state.job_record import restored_job
from understudy.recovery.state.jobs import Job

if TYPE_CHECKING:
    from understudy.recovery.spanning.leader.lead import Lead

log = structlog.get_logger()

LOOK_S = 0.1


class Succession:
    """Decides for one proxyd who leads the jobs of lost leaders on."""

    def __init__(
        self,
        here: str,
        store: Callable[[], ClusterStore],
        cluster: str,
        promote: Callable[[Job], Awaitable[Lead]],
        timing: Timing = TIMING,
    ) -> None:
        """`promote` makes a coordinator of the deputy of a job that is led from here by now."""
        self._here, self._store, self._cluster, self._promote = here, store, cluster, promote
        self._timing = timing
        self._since: dict[tuple[str, str], float] = {}
        """When the loss of a job's leader was seen first: by the job's name and that host."""

    def forget(self, job: str) -> None:
        """It is over here."""
        self._since = {key: since for key, since in self._since.items() if key[0] != job}

    async def why_over(self, job: Job, deputy: Deputy, lost: Collection[str], why: str) -> str:
        """Its leader is lost (`why`), like these hosts: why that is the end, or "": it goes on, or will.

        If we are the standby, it goes on from here when this returns.
        """
        assert job.span is not None
        since = self._since.setdefault((job.name, job.span.leader), time.monotonic())
        too_late = time.monotonic() > since + self._timing.follows_s
        key = standby_key_of(self._cluster, job.name)
        try:
            entry = await self._store().get(key)
            standby = read(entry.value, pb.JobHeir) if entry is not None else pb.JobHeir()
            if entry is None or not job.span.admits(standby.token):
                return "it has left the job to nobody"
            if standby.leader == self._here:  # nobody has heard that we claimed it
                return await self._lead_on(job, deputy, entry, standby, why, too_late)
            if standby.leader != job.span.leader:  # it leads by now, and will follow us
                return self._why_not_led(standby.leader, lost, too_late)
            if not standby.host:
                return "it has left the job to nobody"
            if standby.host != self._here:
                return self._why_not_led(standby.host, lost, too_late)
            return await self._lead_on(job, deputy, entry, standby, why, too_late)
        except BadRecord as problem:
            return f"who was to lead the job on cannot be read: {problem}"
        except ClusterStoreError as problem:
            log.warning("nobody can tell who leads a job on", job=job.name, problem=str(problem))
            return ""

    def _why_not_led(self, host: str, lost: Collection[str], too_late: bool) -> str:
        if host in lost:
            return f"host {host}, which was to lead it on, is lost, too"
        within = f"{self._timing.follows_s:g} s"
        return f"host {host} was to lead it on, and does not within {within}" if too_late else ""

    async def _lead_on(
        self, job: Job, deputy: Deputy, entry: Entry, standby: pb.JobHeir, why: str, too_late: bool
    ) -> str:
        """Raises ClusterStoreError."""
        assert job.span is not None
        state = deputy.standby_states.get(standby.estate)
        if state is None or job.closing:
            nobody = written(pb.JobHeir(version=VERSION, leader=standby.leader, token=standby.token))
            await self._store().swap(entry.key, entry.revision, nobody)  # so others need not wait
            return "what it has left to this host is gone"
        known, former = restored_job(state.known), job.span.leader
        record = pb.JobLeader(version=VERSION, host=self._here, hosts=job.span.hosts, token=job.span.token)
        leadership = await self._claim(job.name, record, standby, entry.revision)
        if leadership is None or deputy.standby_states.get(standby.estate) is not state:
            return "this host was to lead it on, and cannot claim that" if too_late else ""
        log.warning("leads a job on", job=job.name, former=former, why=why)
        deputy.standby_states.hand_over(standby.estate)
        job.span.leader = ""
        job.span.leading = Leading(self._store(), self._cluster, job.name, record, leadership, self._timing)
        _know(job, known, former, self._here, time.monotonic() - deputy.followed_at)
        lead = await self._promote(job)
        take_over(lead, state, former, why)
        return ""

    async def _claim(
        self, job: str, record: pb.JobLeader, standby: pb.JobHeir, revision: int
    ) -> Leadership | None:
        """None: the former leader's lease has some seconds to go, it may be.  Raises ClusterStoreError."""
        if standby.leader != self._here:
            return await claim_as_standby(
                self._store(), self._cluster, job, record, standby.estate, revision, self._timing
            )
        try:
            claimed = await claim(
                self._store(), self._cluster, job, self._here, record.hosts, record.token, standby.estate,
                self._timing,
            )  # fmt: skip
        except NotLed:
            return None
        return claimed.leadership


def _know(job: Job, known: Job, former: str, here: str, away_s: float) -> None:
    """What the former leader knew of it; it has not been heard of for so long."""
    assert job.span is not None
    left = {ended.rank for ended in known.ended}
    job.ended = known.ended + [ended for ended in job.ended if ended.rank not in left]
    job.departed = {
        rank: clean for rank, clean in (job.departed | known.departed).items() if rank not in job.sessions
    }
    job.last_facts = {
        rank: facts for rank, facts in (job.last_facts | known.last_facts).items() if rank in job.departed
    }
    job.recoveries, job.adoptions = known.recoveries, known.adoptions
    job.drills, job.validations = known.drills, known.validations
    job.not_replayable = known.not_replayable or job.not_replayable
    job.corruption = known.corruption
    job.generation = max([job.generation, known.generation])
    if known.span is not None:
        job.span.members = known.span.members - {here, former}
        job.span.awaited = known.span.awaited - {here, former}
        job.span.stored = job.span.stored or known.span.stored
        job.span.given_up |= known.span.given_up
    job.note_adoption(
        pb.Adoption(
            job=job.name, at_ms=int(time.time() * 1000), ranks=len(job.active_sessions()),
            former_host=former, host=here, away_s=away_s, recovery_redone=known.decision is not None,
        )
    )  # fmt: skip


def take_over(lead: Lead, state: StandbyState, former: str, why: str) -> None:
    """The ranks that were on the host that led it before; it is given up once all others have told."""
    images = lead.images
    try:
        if images is not None:
            images.take_over(state, former)
    except OSError as problem:
        log.error("nothing can come back from CPU images", job=lead.job.name, problem=str(problem))
    member = lead.lost_hosts.expect_loss(former)
    for told in state.ranks:
        if told.rank in lead.job.sessions or told.rank in lead.job.departed:
            continue  # it has come here meanwhile, or has ended
        try:
            session = lead.described(member, told)
        except replay.LogError as problem:
            log.error("a rank cannot come back", job=lead.job.name, rank=told.rank, problem=str(problem))
            continue
        session.restores_from_image = state.serial
    lead.run_beside(_give_up(lead, former, why))


async def _give_up(lead: Lead, former: str, why: str) -> None:
    job, span = lead.job, lead.span
    while span.awaited:
        await asyncio.sleep(LOOK_S)
    for session in job.active_sessions():
        if session.host != former:
            session.restores_from_image = 0  # it had gone elsewhere meanwhile
    lead.lost_hosts.give_up_expected(former, why)
    worlds = [session.world for session in job.sessions.values()]
    missing = set(range(max(worlds, default=0))) - job.sessions.keys() - job.departed.keys()
    if missing:
        ranks = ", ".join(f"rank {rank}" for rank in sorted(missing))
        lead.lost_hosts.fail_all({former: why}, ranks, "it had come there after the newest CPU images")
