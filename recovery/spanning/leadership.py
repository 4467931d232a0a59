"""Which proxyd leads a job: it holds a key in the cluster's store, under a lease that it keeps."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass

import structlog

from recovery.control import pb
from recovery.membership.election import Deposed, Leadership, lead
from recovery.membership.records import VERSION, BadRecord, read, written
from recovery.membership.settings import LEASE_S
from recovery.membership.store import ClusterStore, ClusterStoreError, Entry, Put, Unchanged

log = structlog.get_logger()

AGAIN_S = 1.0
TOKEN_BYTES = 32


class NotLed(RuntimeError):
    """A job cannot be led from here, nor followed; its text is a sentence."""


@dataclass(frozen=True)
class Claim:
    """What a job's key says."""

    record: pb.JobLeader
    leadership: Leadership | None
    """None: another host leads."""


def key_of(cluster: str, job: str) -> str:
    """Of the one who leads it."""
    return f"understudy/{cluster}/jobs/{job}/leader"


async def claim(
    store: ClusterStore, cluster: str, job: str, here: str, hosts: int, token: bytes = b""
) -> Claim:
    """Lead the job, or learn who does; raises NotLed, and ClusterStoreError if the store does not answer.

    `token`: of a job that we have led before.  A key of our own name is that of a proxyd here that died.
    """
    key = key_of(cluster, job)
    mine = pb.JobLeader(
        version=VERSION, host=here, hosts=hosts, token=token or secrets.token_bytes(TOKEN_BYTES)
    )
    began = asyncio.get_running_loop().time()
    lease = await store.grant(LEASE_S)
    try:
        known = await store.get(key)
        if known is None or _leader(known, job).host == here:
            revision = known.revision if known is not None else 0
            elected = await store.transact([Unchanged(key, revision)], [Put(key, written(mine), lease)])
            if elected:
                return Claim(mine, Leadership(key, elected, lease, LEASE_S, began))
            known = await store.get(key)
    except BaseException:
        await _let_go(store, lease)
        raise
    await _let_go(store, lease)
    if known is None:
        raise NotLed(f"who leads job {job} changed this very moment: try again")
    record = _leader(known, job)
    if record.host == here or record.hosts != hosts or hosts < 2:
        raise NotLed(
            f"there is a job {job} already, led by host {record.host} and started for {record.hosts} host"
            f"{'s' if record.hosts != 1 else ''}: name another --job, or the same --hosts on each"
        )
    return Claim(record, None)


def _leader(entry: Entry, job: str) -> pb.JobLeader:
    try:
        return read(entry.value, pb.JobLeader)
    except BadRecord as problem:
        raise NotLed(f"who leads job {job} cannot be read: {problem}") from problem


async def _let_go(store: ClusterStore, lease: int) -> None:
    try:
        await store.revoke(lease)
    except ClusterStoreError as problem:
        log.debug("a lease ends by itself", problem=str(problem))


class Leading:
    """Keeps a leadership, and takes it up again: only a proxyd of this host can lead this job."""

    def __init__(
        self,
        store: ClusterStore,
        cluster: str,
        job: str,
        record: pb.JobLeader,
        leadership: Leadership | None = None,
    ) -> None:
        """Without a leadership it is still to be claimed: a proxyd before us had it."""
        self._store, self._cluster, self._job = store, cluster, job
        self._leadership = leadership
        self.record = record
        self.token = leadership.token if leadership is not None else 0
        """Of the newest leadership that we had; a later one's is greater."""
        self.holds = asyncio.Event()
        """Set while we lead, as far as we know."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            if self._leadership is None:
                self._leadership = await self._claim_again()
            self.token = self._leadership.token
            self.holds.set()
            try:
                await lead(self._store, self._leadership)
            except Deposed as problem:
                log.warning("leads no more, for now", job=self._job, problem=str(problem))
            self.holds.clear()
            self._leadership = None

    async def _claim_again(self) -> Leadership:
        record = self.record
        while True:
            try:
                claimed = await claim(
                    self._store, self._cluster, self._job, record.host, record.hosts, record.token
                )
            except (ClusterStoreError, NotLed) as problem:
                log.debug("cannot lead again yet", job=self._job, problem=str(problem))
            else:
                if claimed.leadership is not None:
                    log.info("leads", job=self._job)
                    return claimed.leadership
            await asyncio.sleep(AGAIN_S)

    async def resign(self) -> None:
        """The job is over."""
        self.holds.clear()
        if self._leadership is not None:
            await _let_go(self._store, self._leadership.lease)
