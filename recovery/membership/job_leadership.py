"""Which proxyd leads a job: it holds a key in the cluster's store, under a lease that it keeps."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from understudy.protos import control_pb2 as pb
from understudy.recovery.base.timing import TIMING, Timing
from understudy.recovery.membership.election import Deposed, Leadership, lead
from understudy.recovery.membership.records import VERSION, BadRecord, read, written
from understudy.recovery.membership.stores.store import (
    ClusterStore,
    ClusterStoreError,
    Delete,
    Entry,
    Put,
    Unchanged,
    below,
)

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
    """None: another host leads, or it alone may."""


def key_of(cluster: str, job: str) -> str:
    """The key of the host that leads a job."""
    return f"understudy/{cluster}/jobs/{job}/leader"


def owner_key_of(cluster: str, job: str) -> str:
    """The key that says whose a job is, also while nobody leads it."""
    return f"understudy/{cluster}/jobs/{job}/owner"


def records_of(cluster: str, job: str) -> str:
    """What all records of jobs of that name lie below: of this run, and of those before it."""
    return f"understudy/{cluster}/jobs/{job}/record/"


async def claim(
    store: ClusterStore,
    cluster: str,
    job: str,
    here: str,
    hosts: int,
    token: bytes = b"",
    timing: Timing = TIMING,
) -> Claim:
    """Lead the job, or learn who does; raises NotLed, and ClusterStoreError if the store does not answer.

    `token`: of a job that we have led before; without one it is a new job, and records of others go.
    A key of our own name is that of a proxyd here that died.
    """
    key, owner = key_of(cluster, job), owner_key_of(cluster, job)
    mine = pb.JobLeader(
        version=VERSION, host=here, hosts=hosts, token=token or secrets.token_bytes(TOKEN_BYTES)
    )
    began = asyncio.get_running_loop().time()
    lease = await store.grant(timing.lease_s)
    try:
        known, whose = await store.get(key), await store.get(owner)
        if known is None or _leader(known, job).host == here:
            if other := _other_owner(whose, mine) if token else "":
                await _let_go(store, lease)
                return Claim(pb.JobLeader(version=VERSION, host=other, hosts=hosts, token=token), None)
            former = [] if token else [below(records_of(cluster, job))]
            elected = await store.transact(
                [_as_seen(key, known), _as_seen(owner, whose)],
                [Put(key, written(mine), lease), Put(owner, written(_ours(mine))), *former],
            )
            if elected:
                return Claim(mine, Leadership(key, elected, lease, timing.lease_s, began))
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


def _as_seen(key: str, entry: Entry | None) -> Unchanged:
    return Unchanged(key, entry.revision if entry is not None else 0)


def _ours(mine: pb.JobLeader) -> pb.JobOwner:
    return pb.JobOwner(version=VERSION, leader=mine.host, token=mine.token)


def _other_owner(entry: Entry | None, mine: pb.JobLeader) -> str:
    """The host that has led this very job on; empty: none has.  Raises NotLed."""
    try:
        whose = read(entry.value, pb.JobOwner) if entry is not None else pb.JobOwner()
    except BadRecord as problem:
        raise NotLed(f"whose job that is cannot be read: {problem}") from problem
    return whose.leader if whose.token == mine.token and whose.leader != mine.host else ""


async def claim_lost(
    store: ClusterStore, cluster: str, job: str, mine: pb.JobLeader, as_read: Sequence[Unchanged],
    timing: Timing = TIMING,
) -> Leadership | None:  # fmt: skip
    """Lead a job whose leader is lost, if it is still his, and its record as it was read: `as_read`.

    None: the former leader's lease has not ended yet, or another one leads, or the record has gone on.
    Raises ClusterStoreError.
    """
    key, owner = key_of(cluster, job), owner_key_of(cluster, job)
    began = asyncio.get_running_loop().time()
    lease = await store.grant(timing.lease_s)
    try:
        elected = await store.transact(
            [Unchanged(key, 0), *as_read],
            [Put(key, written(mine), lease), Put(owner, written(_ours(mine)))],
        )
    except BaseException:
        await _let_go(store, lease)
        raise
    if not elected:
        await _let_go(store, lease)
        return None
    return Leadership(key, elected, lease, timing.lease_s, began)


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
    """Keeps a leadership, and takes it up again, unless another host leads the job by then."""

    def __init__(
        self,
        store: ClusterStore,
        cluster: str,
        job: str,
        record: pb.JobLeader,
        leadership: Leadership | None = None,
        timing: Timing = TIMING,
    ) -> None:
        """Without a leadership it is still to be claimed: a proxyd before us had it."""
        self._store, self._cluster, self._job = store, cluster, job
        self._leadership, self._timing = leadership, timing
        self.record = record
        self.key = key_of(cluster, job)
        self.token = leadership.token if leadership is not None else 0
        """Of the newest leadership that we had; a later one's is greater."""
        self.holds = asyncio.Event()
        """Set while we lead, as far as we know."""

    async def run(self, superseded: Callable[[str], None]) -> None:
        """Until cancelled; `superseded` is called with the host that leads instead: we never shall again."""
        while True:
            if self._leadership is None:
                claimed = await self._claim_again()
                if isinstance(claimed, str):
                    return superseded(claimed)
                self._leadership = claimed
            self.token = self._leadership.token
            self.holds.set()
            try:
                await lead(self._store, self._leadership)
            except Deposed as problem:
                log.warning("leads no more, for now", job=self._job, problem=str(problem))
            self.holds.clear()
            self._leadership = None

    async def _claim_again(self) -> Leadership | str:
        """Or the name of the host that leads."""
        record = self.record
        while True:
            try:
                claimed = await claim(
                    self._store, self._cluster, self._job, record.host, record.hosts, record.token,
                    timing=self._timing,
                )  # fmt: skip
            except (ClusterStoreError, NotLed) as problem:
                log.debug("cannot lead again yet", job=self._job, problem=str(problem))
            else:
                if claimed.leadership is not None:
                    log.info("leads", job=self._job)
                    return claimed.leadership
                log.error("another host leads", job=self._job, host=claimed.record.host)
                return str(claimed.record.host)
            await asyncio.sleep(AGAIN_S)

    async def resign(self) -> None:
        """The job is over."""
        self.holds.clear()
        if self._leadership is not None:
            owner = Delete(owner_key_of(self._cluster, self._job))
            records = below(records_of(self._cluster, self._job))
            try:
                await self._store.transact([self._leadership.holds], [owner, records])
            except ClusterStoreError as problem:
                log.debug("the name of a job that is over stays", job=self._job, problem=str(problem))
            await _let_go(self._store, self._leadership.lease)
