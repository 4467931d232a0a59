"""What a leader leaves to its standby: the host that leads the job on, should the leader's own be lost.

The standby is named in the cluster's store (JobHeir), with the id of what it has to have: it may follow only
if both still agree.  So nothing that the standby lacks may have had consequences while it is named there:
a request to the job's `torch.distributed` store is answered once the standby has what it changed, or once
nobody is the standby any more.  What was decided about a fault is done once the standby knows of that.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from understudy.recovery.base.background import Complaints
from understudy.recovery.base.control import pb
from understudy.recovery.membership.network.links import LARGEST_MESSAGE
from understudy.recovery.membership.records import VERSION, written
from understudy.recovery.membership.stores.store import ClusterStore, ClusterStoreError, Put, Unchanged
from understudy.recovery.migration.process.imaging import Image
from understudy.recovery.migration.transfer.reception import AT_LEAST_S, SLOWEST, NotSent
from understudy.recovery.migration.transfer.stream import Outgoing
from understudy.recovery.rendezvous.store import Change, Store
from understudy.recovery.spanning.ranks.image_file import BadImage
from understudy.recovery.spanning.ranks.remote import SteerFailed
from understudy.recovery.state.jobs import Job, Session

if TYPE_CHECKING:
    from understudy.recovery.spanning.leader.cpu_images import Pair
    from understudy.recovery.spanning.leader.lead import Lead
    from understudy.recovery.spanning.leader.member_link import MemberLink

log = structlog.get_logger()

LOOK_S = 1.0
AGAIN_S = 0.2
STORE_S = 5.0
"""For the standby to take what was written to the store, while whoever wrote it waits."""
JOB_S = 10.0
"""For the standby to take what is known of the job, while a recovery waits."""
ENOUGH_BYTES = LARGEST_MESSAGE // 4
"""In one message."""
AROUND_BYTES = 32
"""Of a change, beside what it holds."""


class NotLeft(Exception):
    """Nobody could lead the job on; its text says why."""


@dataclass(frozen=True)
class Sources:
    """What this host has to leave."""

    store: Callable[[Job], Store | None]
    """Of a job's workers."""
    image: Callable[[Session], AbstractAsyncContextManager[Image]]
    """Of a worker, which runs on; raises NotSent."""
    describe: Callable[[Session], pb.RankDescription]
    known: Callable[[Job], pb.JournaledJob]


class StandbyReplication:
    """Sends the state of one job that we lead to its standby."""

    def __init__(
        self, job: Job, lead: Lead, cluster: ClusterStore, key: str, sources: Sources,
        lapsed: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`key`: of the JobHeir; `lapsed` is called with the reason when there is no standby any more."""
        self._job, self._lead, self._cluster, self._key, self._sources = job, lead, cluster, key, sources
        self.host = ""
        """The host; empty: there is none."""
        self._state_id = ""
        """That it is named with; empty: it is not named yet."""
        self._number = 0
        self._named_under = 0
        """Token of the leadership."""
        self._changes: list[Change] = []
        self._copies = 0
        """Of the store, that were begun: each is up to date until nobody is the standby."""
        self._sending = asyncio.Lock()
        """Held while the store is copied, and while it changes who is named."""
        self._telling = asyncio.Lock()
        """Held while what is known of the job is told, and until it is named with that."""
        self._leaving = asyncio.Lock()
        self._pair: Pair | None = None
        self._told = pb.JournaledJob()
        self._times = 0
        """How often the standby had been reached when it was told."""
        self._lapsed = lapsed

    # ------------------------------------------------------------------ leaving
    async def leave(self, pair: Pair, sessions: Sequence[Session]) -> float:
        """All that goes with a set of snapshots: then the standby is named, and needs no former set.

        `sessions`: our own.  Answers how long their workers stood still; raises NotLeft: there is no standby.
        """
        async with self._leaving:
            try:
                return await self._leave(pair, sessions)
            except NotLeft as problem:
                await self.void(str(problem))
                raise

    async def _leave(self, pair: Pair, sessions: Sequence[Session]) -> float:
        """Raises NotLeft."""
        member = await self._chosen()
        copy, state_id, paused_s = self._copies, secrets.token_hex(8), 0.0
        for session in sessions:
            paused_s += await self._send_image(state_id, session)
        async with self._telling:
            await self._send_job(state_id, pair, sessions)
            async with self._sending:  # from when it may be named on, it lacks nothing
                if not self.host or self._copies != copy:
                    raise NotLeft(f"host {member.host} has not got all of the store meanwhile")
                try:
                    await self._name(member.host, state_id)
                except NotLeft as problem:
                    await self._void(str(problem))
                    raise
                self._state_id, self._pair, self._lead.span.standby = state_id, pair, member.host
        return paused_s

    async def _chosen(self) -> MemberLink:
        """The standby, who has all of the store; raises NotLeft."""
        if self.host:
            try:
                return self._member()
            except NotLeft as problem:
                await self.void(str(problem))
        why = "no other host has ranks of the job"
        for member in sorted(self._lead.members.values(), key=lambda one: one.host):
            if member.lost or not member.connected.is_set() or not self._lead.of(member):
                continue
            try:
                await self._begin(member)
            except NotLeft as problem:
                why = str(problem)
                continue
            return member
        raise NotLeft(why)

    async def _begin(self, member: MemberLink) -> None:
        """Copy the store; raises NotLeft."""
        store = self._sources.store(self._job)
        if store is None:
            raise NotLeft("the job was not started with proxyrun --migratable")
        async with self._sending:
            self._copies += 1
            self._changes = store.changes()
            store.tell_changes(self._changes.append)
            self.host = member.host
            try:
                await self._send_changes(first=True)
            except NotLeft:
                self._forget()
                raise

    def _forget(self) -> None:
        store = self._sources.store(self._job)
        if store is not None:
            store.tell_changes(None)
        self.host, self._state_id, self._pair, self._lead.span.standby = "", "", None, ""
        self._changes = []

    async def settle(self) -> None:
        """Until what was written to the store outlives this host, if there is a standby."""
        await self._may_name()
        if not self.host:
            return
        async with self._sending:
            try:
                await self._send_changes(first=False)
            except NotLeft as problem:
                await self._void(str(problem))

    async def settle_job(self) -> None:
        """Until what is known of the job outlives this host, if there is a standby."""
        await self._may_name()
        async with self._telling:
            try:
                await self._tell()
            except NotLeft as problem:
                await self.void(str(problem))

    async def _may_name(self) -> None:
        """Until we lead: before, a standby that a proxyd before us has named may still be named."""
        leading = self._lead.span.leading
        if leading is not None and not leading.token:
            await leading.holds.wait()

    async def _tell(self) -> None:
        """The standby, what is new of the job; raises NotLeft."""
        if not self._state_id or self._pair is None:
            return
        if self._sources.known(self._job) != self._told or self._member().times != self._times:
            await self._send_job(self._state_id, self._pair, ())

    async def _send_changes(self, *, first: bool) -> None:
        """Raises NotLeft."""
        while self._changes or first:
            request = pb.KeepStoreRequest(first=first, number=self._next(), **self._lead.credentials())
            size = taken = 0
            for change in self._changes:
                size += len(change.key) + len(change.value or b"") + len(change.request) + AROUND_BYTES
                if request.changes and size > ENOUGH_BYTES:
                    break
                taken += 1
                request.changes.append(_stored(change))
            await self._ask("KeepStore", request, STORE_S)
            del self._changes[:taken]
            first = False

    def _next(self) -> int:
        self._number += 1
        return self._number

    async def _send_image(self, state_id: str, session: Session) -> float:
        """Raises NotLeft."""
        if session.moving is not None or not session.relay or not session.active:
            raise NotLeft(f"the worker of rank {session.rank} cannot be dumped now")
        try:
            async with self._sources.image(session) as image:
                first = await anext(image.parts)
                allowed = AT_LEAST_S + (first.header.image_bytes + first.header.log_bytes) / SLOWEST
                requests = self._image_parts(first, image, state_id, session.rank)
                await self._send("KeepImage", requests, allowed)
                return image.paused_s
        except (NotSent, BadImage, OSError) as problem:
            raise NotLeft(str(problem)) from problem

    async def _image_parts(
        self, first: pb.WorkerPart, image: Image, state_id: str, rank: int
    ) -> AsyncIterator[pb.KeepImageRequest]:
        yield pb.KeepImageRequest(part=first, estate=state_id, rank=rank, **self._lead.credentials())
        async for part in image.parts:
            yield pb.KeepImageRequest(part=part)

    async def _send_job(self, state_id: str, pair: Pair, sessions: Sequence[Session]) -> None:
        """Raises NotLeft."""
        known, times = self._sources.known(self._job), self._member().times
        first = pb.KeepJobRequest(
            estate=state_id, former=self._state_id, serial=pair.serial, cut=_cut(pair.commits), known=known,
            number=self._next(), news=state_id == self._state_id, **self._lead.credentials(),
        )  # fmt: skip

        async def requests() -> AsyncIterator[pb.KeepJobRequest]:
            yield first
            for session in sessions:
                yield pb.KeepJobRequest(rank=self._sources.describe(session))

        await self._send("KeepJob", requests(), JOB_S)
        self._told, self._times = known, times

    async def _send(self, method: str, requests: AsyncIterator[Any], within_s: float) -> None:
        """All of these, to the standby; raises NotLeft."""
        outgoing = Outgoing(requests)
        try:
            await self._ask(method, aiter(outgoing), within_s)
        except NotLeft:
            if outgoing.problem is not None:
                raise NotLeft(str(outgoing.problem)) from outgoing.problem
            raise

    async def _ask(self, method: str, request: Any, within_s: float) -> None:
        """The standby; raises NotLeft."""
        try:
            reply = await self._member().ask(method, request, within_s)
        except SteerFailed as problem:
            raise NotLeft(problem.details()) from problem
        if reply.error:
            raise NotLeft(f"host {self.host}: {reply.error[:300]}")

    def _member(self) -> MemberLink:
        """The standby; raises NotLeft."""
        member = self._lead.members.get(self.host)
        if member is None or member.lost:
            who = f"host {self.host} takes" if self.host else "whoever was to lead the job on takes"
            raise NotLeft(f"{who} no part in it any more")
        return member

    # ------------------------------------------------------------------ who is named
    async def _name(self, host: str, state_id: str) -> None:
        """Raises NotLeft: it may be named all the same."""
        leading = self._lead.span.leading
        assert leading is not None
        if not leading.holds.is_set():
            raise NotLeft("this host does not lead the job for the moment")
        under = leading.token
        try:
            named = await self._write(host, state_id, under)
        except ClusterStoreError as problem:
            raise NotLeft(f"nobody can be named as standby: {problem}") from problem
        if not named:
            raise NotLeft("this host does not lead the job any more")
        self._named_under = under

    async def _write(self, host: str, state_id: str, under: int) -> bool:
        """Whether it is written, as a leader still may; raises ClusterStoreError.

        A request of ours that was held up cannot undo a later one: each is for what was there before it.
        """
        leading = self._lead.span.leading
        assert leading is not None
        known = await self._cluster.get(self._key)
        record = pb.JobHeir(
            version=VERSION,
            leader=leading.record.host,
            token=leading.record.token,
            host=host,
            estate=state_id,
        )
        conditions = [Unchanged(leading.key, under), Unchanged(self._key, known.revision if known else 0)]
        return bool(await self._cluster.transact(conditions, [Put(self._key, written(record))]))

    async def void(self, why: str) -> None:
        """Nobody is the standby: once this returns."""
        async with self._sending:
            await self._void(why)

    async def _void(self, why: str) -> None:
        host, named = self.host, bool(self._state_id)
        if not host:
            return
        leading = self._lead.span.leading
        assert leading is not None
        # Without the cluster's store nobody knows; and of a leader that is none any more nothing counts.
        while True:
            await leading.holds.wait()
            try:
                if await self._write("", "", leading.token):
                    break
            except ClusterStoreError as problem:
                log.debug("a standby is still named", job=self._job.name, problem=str(problem))
            await asyncio.sleep(AGAIN_S)
        self._forget()
        if named:
            log.warning("nobody would lead a job on", job=self._job.name, host=host, reason=why)
        self._lapsed(why)

    def close(self) -> None:
        """The job is over: nobody needs to lead it on."""
        self._forget()

    # ------------------------------------------------------------------ keeping it so
    async def run(self) -> None:
        """Until cancelled."""
        complaints = Complaints("standbys")
        while True:
            await asyncio.sleep(LOOK_S)
            if self._state_id:
                with complaints.survived(self._job.name):
                    await self.look()

    async def look(self) -> None:
        """Once: whether the standby still has all, and knows what has happened."""
        async with self._leaving:
            await self._look()

    async def _look(self) -> None:
        leading, pair, member = self._lead.span.leading, self._pair, self._lead.members.get(self.host)
        assert leading is not None
        if not self._state_id:
            return
        if not leading.holds.is_set() and member is not None and not member.lost:
            return
        try:
            async with self._telling:
                await self._tell()
            async with self._sending:
                if leading.token != self._named_under and self._pair is pair:
                    await self._name(self.host, self._state_id)
        except NotLeft as problem:
            if self._pair is pair:
                await self.void(str(problem))


def _cut(commits: Mapping[int, Any]) -> list[pb.CutPlace]:
    return [
        pb.CutPlace(rank=rank, log_offset=commit.log_offset, step=commit.step)
        for rank, commit in sorted(commits.items())
    ]


def _stored(change: Change) -> pb.StoredKey:
    return pb.StoredKey(
        key=change.key, value=change.value or b"", deleted=change.value is None, request=change.request,
        count=change.count,
    )  # fmt: skip
