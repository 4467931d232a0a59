"""A job whose leading host is lost goes on under one of its standbys: the hosts that its record names.

A standby that keeps images of all workers of lost hosts claims the job in the cluster's store, which lets it
only once the lost leader's lease is gone, and if the record is as it was read.  It makes the job its own,
waits until all other members have described their ranks to it, and gives the lost hosts up then, as any
leader does: the ranks that were there come back from its images.  The other members wait for it, and learn
from whom they are followed.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING

import structlog

from understudy.protos import control_pb2 as pb
from understudy.recovery.base.timing import TIMING, Timing
from understudy.recovery.membership.election import Leadership
from understudy.recovery.membership.job_leadership import Leading, NotLed, claim, claim_lost, owner_key_of
from understudy.recovery.membership.records import VERSION, BadRecord, read
from understudy.recovery.membership.stores.store import ClusterStore, ClusterStoreError, Unchanged
from understudy.recovery.planning.takeover.histories import merged_hosts
from understudy.recovery.planning.takeover.takeover import takeover
from understudy.recovery.record.log import Recorded, RecordLog
from understudy.recovery.rendezvous.store import MOST_DONE_OF_WORKERS, Change, Store, StoreFull
from understudy.recovery.spanning.leader.lost_hosts import Handover
from understudy.recovery.spanning.member.deputy import Deputy
from understudy.recovery.spanning.ranks.image_set import KeptSet, Left
from understudy.recovery.state.jobs import Job
from understudy.recovery.state.journaled_job import (
    history_of,
    hosts_of,
    restored_job,
    take_history,
    take_hosts,
)

if TYPE_CHECKING:
    from understudy.recovery.spanning.leader.lead import Lead

log = structlog.get_logger()

NOBODY = "it has left the job to nobody"


class Succession:
    """Decides for one proxyd who leads the jobs of lost leaders on."""

    def __init__(
        self,
        here: str,
        store: Callable[[], ClusterStore],
        cluster: str,
        promote: Callable[[Job, Handover], Awaitable[Lead]],
        worker_store: Callable[[Job], Store | None],
        timing: Timing = TIMING,
    ) -> None:
        """`promote` makes a coordinator of the deputy of a job that is led from here by now.

        `worker_store`: that of a job's workers, on this host.
        """
        self._here, self._store, self._cluster, self._promote = here, store, cluster, promote
        self._worker_store, self._timing = worker_store, timing
        self._since: dict[tuple[str, str], float] = {}
        """When the loss of a job's leader was seen first: by the job's name and that host."""
        self._recorded: dict[str, tuple[float, Recorded]] = {}
        """Records by job, and until when they are not read again."""

    def forget(self, job: str) -> None:
        """It is over here."""
        self._since = {key: since for key, since in self._since.items() if key[0] != job}
        self._recorded.pop(job, None)

    async def why_over(self, job: Job, deputy: Deputy, lost: Mapping[str, str]) -> str:
        """Its leader is lost, like these hosts: why that is the end, or "": it goes on, or will.

        If we are the standby whose turn it is, it goes on from here when this returns.
        """
        assert job.span is not None
        since = self._since.setdefault((job.name, job.span.leader), time.monotonic())
        waited_s = time.monotonic() - since
        store = self._store()
        try:
            entry = await store.get(owner_key_of(self._cluster, job.name))
            owner = read(entry.value, pb.JobOwner) if entry is not None else pb.JobOwner()
            if entry is None or not job.span.admits(owner.token):
                return NOBODY
            unheard = owner.leader == self._here  # nobody has heard that we claimed it
            former = job.span.leader if unheard else owner.leader
            if former not in lost:  # it leads by now, and will follow us; else it was lost before it did
                return self._why_not_led([former], lost, waited_s)
            records = RecordLog(store, self._cluster, job.name, job.span.token)
            recorded = await self._read(job, records)
            images = recorded.images
            if not recorded.kept or recorded.over or images is None or job.closing:
                return f"{NOBODY}: {recorded.over}" if recorded.over else NOBODY
            if self._worker_store(job) is None:
                return "no worker here was started with proxyrun --migratable"
            next_leader = NextLeader(
                recorded, images, self._here, lost.keys(), deputy.kept_images.get(images.id)
            )
            if not next_leader.ours and next_leader.able and not unheard:
                return self._why_not_led(next_leader.able, lost, waited_s)
            if not next_leader.ours:
                return next_leader.problem
            if not unheard and waited_s < next_leader.after * self._timing.follows_s:
                return ""
            as_read = [Unchanged(entry.key, entry.revision), records.as_read(recorded)]
            if await self._lead_on(job, deputy, recorded, as_read, former, lost, unheard):
                return ""
            too_late = waited_s > (next_leader.after + 1) * self._timing.follows_s
            return "this host was to lead it on, and cannot claim that" if too_late else ""
        except BadRecord as problem:
            return f"the job's record cannot be read: {problem}"
        except ClusterStoreError as problem:
            log.warning("nobody can tell who leads a job on", job=job.name, problem=str(problem))
            return ""

    async def _read(self, job: Job, records: RecordLog) -> Recorded:
        """The job's record; not each time if we do not lead it on: all members look, and it may be large."""
        known = self._recorded.get(job.name)
        if known is not None and time.monotonic() < known[0]:
            return known[1]
        recorded = await records.read()
        if recorded.images is not None and self._here not in recorded.images.standbys:
            self._recorded[job.name] = time.monotonic() + self._timing.record_again_s, recorded
        return recorded

    def _why_not_led(self, hosts: Collection[str], lost: Collection[str], waited_s: float) -> str:
        """The first of these that can is to lead it on."""
        names, within_s = " or ".join(hosts), self._timing.follows_s * len(hosts)
        if all(host in lost for host in hosts):
            return f"host {names}, which was to lead it on, is lost, too"
        return (
            f"host {names} was to lead it on, and does not within {within_s:g} s"
            if waited_s > within_s
            else ""
        )

    async def _lead_on(
        self,
        job: Job,
        deputy: Deputy,
        recorded: Recorded,
        as_read: list[Unchanged],
        former: str,
        lost: Mapping[str, str],
        unheard: bool,
    ) -> bool:
        """Whether we lead it now, after `former`; raises ClusterStoreError, BadRecord."""
        span, images, worker_store = job.span, recorded.images, self._worker_store(job)
        assert span is not None and images is not None and worker_store is not None
        known, changes = known_of(job, recorded.known), _changes(recorded)
        record = pb.JobLeader(version=VERSION, host=self._here, hosts=span.hosts, token=span.token)
        leadership = await self._claim(job.name, record, as_read, unheard)
        if leadership is None or deputy.kept_images.get(images.id) is None:
            return False
        log.warning("leads a job on", job=job.name, former=former, why=lost[former])
        kept = deputy.kept_images.hand_over(images.id)
        worker_store.forget("")
        for change in changes:
            worker_store.take(change)
        span.leader = ""
        span.leading = Leading(self._store(), self._cluster, job.name, record, leadership, self._timing)
        _know(job, known, former, self._here, deputy)
        handover = Handover(former, recorded, Left(images, kept))
        lead = await self._promote(job, handover)
        lead.lost_hosts.take_over(handover, lost)
        return True

    async def _claim(
        self, job: str, record: pb.JobLeader, as_read: list[Unchanged], unheard: bool
    ) -> Leadership | None:
        """None: the former leader's lease has some seconds to go, it may be.  Raises ClusterStoreError."""
        if not unheard:
            return await claim_lost(self._store(), self._cluster, job, record, as_read, self._timing)
        try:
            claimed = await claim(
                self._store(), self._cluster, job, self._here, record.hosts, record.token, self._timing
            )
        except NotLed:
            return None
        return claimed.leadership


class NextLeader:
    """Who of a job's standbys can lead it on, now that these hosts are lost, and when it is our turn."""

    def __init__(
        self, recorded: Recorded, images: pb.ImageSet, here: str, lost: Collection[str], kept: KeptSet | None
    ) -> None:
        """`kept`: images of that set that are here."""
        needed = [one for one in images.workers if one.host in lost]
        # A host that was given up has workers whose ranks go on elsewhere, if it was only cut off.
        over = {(one.host, one.process.pid) for one in recorded.known.span.given_up}
        given_up = {one.host for one in images.workers if (one.host, one.worker.pid) in over}
        named = [host for host in images.standbys if host not in lost and host not in given_up]
        self.able = [host for host in named if all(host in one.holders for one in needed)]
        """In the order in which they do."""
        self.after = self.able.index(here) if here in self.able else 0
        """For so many others we wait first."""
        self.ours = here in self.able and kept is not None and all(one.rank in kept.images for one in needed)
        self.problem = "no host that is left has CPU images of all workers that were lost"
        """Why it is not ours."""
        if here in given_up:
            self.problem = "this host was given up, and its ranks go on elsewhere"
        elif not named:
            one, all_of_them = list(images.standbys), " and ".join(images.standbys)
            self.problem = (
                f"host {all_of_them}, which was to lead it on, is lost, too" if len(one) == 1 else
                f"hosts {all_of_them}, which were to lead it on, are lost, too"
            )  # fmt: skip
        elif here in self.able and not self.ours:
            self.problem = "the CPU images that were kept on this host are gone"
            self.able.remove(here)


def known_of(job: Job, written: pb.JournaledJob) -> Job:
    """What is known of the job, by its record, which anybody may have written; raises BadRecord."""
    if written.name != job.name:
        raise BadRecord(f"it is of job {written.name[:80]!r}")
    here = pb.JournaledJob()
    here.CopyFrom(written)
    here.ClearField("launcher")  # that of another host
    try:
        return restored_job(here)
    except (ValueError, TypeError, LookupError, AttributeError) as problem:
        raise BadRecord(f"what it says of the job makes no sense: {problem}") from problem


def _changes(recorded: Recorded) -> list[Change]:
    """Those that make the workers' store, the newest of each key; raises BadRecord: there is no room."""
    made = Store(None, MOST_DONE_OF_WORKERS)
    try:
        for change in recorded.changes:
            made.take(change)
    except StoreFull as problem:
        raise BadRecord(str(problem)) from problem
    return made.changes()


def _know(job: Job, known: Job, former: str, here: str, deputy: Deputy) -> None:
    """What the former leader knew of it, and we have seen of it."""
    assert job.span is not None
    ranks = [deputy.report(session) for session in job.sessions.values()]
    history = takeover(history_of(known), history_of(job), ranks).history
    take_history(job, history)
    if known.span is not None:
        take_hosts(job.span, merged_hosts(hosts_of(known.span), hosts_of(job.span), {here, former}))
    job.note_adoption(
        pb.Adoption(
            job=job.name, at_ms=int(time.time() * 1000), ranks=len(job.active_sessions()),
            former_host=former, host=here, away_s=time.monotonic() - deputy.followed_at,
            recovery_redone=history.under_way,
        )
    )  # fmt: skip
