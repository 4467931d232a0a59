"""The standbys of a job that we lead: hosts of which one leads it on, should ours be lost.

They keep images of workers, so that no two hosts have the only ones: of those of our own host, both do; of
the others, the first one keeps all but its own, and the second one those of the first.  All else that whoever
leads next must know is in the job's record, which names the images that count.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from understudy.protos import control_pb2 as pb
from understudy.recovery.agent_api.commands import NotDone
from understudy.recovery.base.background import Complaints
from understudy.recovery.migration.process.imaging import Image
from understudy.recovery.migration.transfer.reception import AT_LEAST_S, SLOWEST, NotSent
from understudy.recovery.migration.transfer.stream import Outgoing, read_ahead
from understudy.recovery.record.job_record import JobRecord, NoRecord
from understudy.recovery.record.log import Recorded
from understudy.recovery.spanning.ranks.image_file import BadImage, ImageFile, Taken, read_parts
from understudy.recovery.spanning.ranks.image_pair import Pair, cut_of
from understudy.recovery.state.jobs import Job, Session

if TYPE_CHECKING:
    from understudy.recovery.spanning.leader.lead import Lead
    from understudy.recovery.spanning.leader.member_link import MemberLink

log = structlog.get_logger()

LOOK_S = 1.0
RELEASE_S = 5.0
MOST_STANDBYS = 2


class NotLeft(Exception):
    """Nobody could lead the job on; its text says why."""


class Declined(NotLeft):
    """By the host that was asked."""


@dataclass(frozen=True)
class Sources:
    """What this host has of its workers."""

    image: Callable[[Session], AbstractAsyncContextManager[Image]]
    """Of a worker, which runs on; raises NotSent."""
    describe: Callable[[Session], pb.RankDescription]
    """A rank, of whichever host."""


@dataclass(frozen=True)
class Lapse:
    """Who is called when standbys are lost, or images count."""

    none_left: Callable[[str], None]
    """There is none any more, for that reason."""
    fewer: Callable[[], None]
    """There are fewer."""
    named: Callable[[pb.ImageSet], Awaitable[None]]
    """These images are about to count."""


class Standbys:
    """Sends images to them, and has the job's record name them."""

    def __init__(self, job: Job, lead: Lead, record: JobRecord, sources: Sources, lapse: Lapse) -> None:
        self._job, self._lead, self.record, self._sources = job, lead, record, sources
        self._lapse = lapse
        self._times: dict[str, int] = {}
        """Standbys, in their order, and how often each had been reached when it got what it keeps."""
        self._images = pb.ImageSet()
        """Those that the record names."""
        self._count = self._named = 0
        """Of sets that were begun, and which of them the record names."""
        self._changing = asyncio.Lock()

    @property
    def hosts(self) -> tuple[str, ...]:
        """Who would lead the job on, in this order."""
        return tuple(self._times)

    # ------------------------------------------------------------------ leaving
    async def leave(self, pair: Pair, sessions: Sequence[Session]) -> float:
        """All images that go with a set of snapshots, once the record names them; former ones are let go of.

        `sessions`: our own.  Answers how long their workers stood still; raises NotLeft: there is no standby.
        """
        async with self._changing:
            try:
                return await self._leave(pair, sessions)
            except NotLeft as problem:
                await self._void(str(problem))
                raise

    async def _leave(self, pair: Pair, sessions: Sequence[Session]) -> float:
        """Raises NotLeft."""
        images, paused_s = dict(pair.images), 0.0
        ours: list[Path] = []
        try:
            for session in sessions:
                ours.append(pair.folder / f"rank-{session.rank}")
                images[session.rank], paused = await self._dump(session, ours[-1])
                paused_s += paused
            self._count += 1
            made = pb.ImageSet(id=secrets.token_hex(8), serial=pair.serial, cut=cut_of(pair.commits))
            times = await self._send_all(made, images)
            await self._name(made, times)
        finally:
            for path in ours:  # its workers are lost with this host, or go on
                await asyncio.to_thread(path.unlink, True)
        self._lead.run_beside(self._release(self._only_named(self._named)))
        return paused_s

    async def _name(self, images: pb.ImageSet, times: Mapping[str, int]) -> None:
        """Raises NotLeft."""
        try:
            await self.record.begin()
        except NoRecord as problem:
            raise NotLeft(str(problem)) from problem
        await self._lapse.named(images)
        await self.record.name(images)
        self._images, self._times, self._named = images, dict(times), self._count
        self._tell()

    async def _send_all(self, made: pb.ImageSet, images: Mapping[int, Taken]) -> dict[str, int]:
        """To as many as can keep them: who those are; raises NotLeft: nobody can."""
        times: dict[str, int] = {}
        sessions = {session.rank: session for session in self._job.active_sessions()}
        holders: dict[int, list[str]] = {rank: [] for rank in images}
        why = "no other host has ranks of the job"
        for member in self._candidates():
            if len(times) == MOST_STANDBYS:
                break
            ranks = [rank for rank in sorted(images) if self._is_for(member, sessions.get(rank), times)]
            number = member.times
            try:
                with contextlib.suppress(Declined):  # of sets that came to nothing it needs none
                    await self._ask(member, "ReleaseImages", self._only_named(self._count - 1), RELEASE_S)
                for rank in ranks:
                    await self._send_image(member, made.id, sessions[rank], images[rank])
            except NotLeft as problem:
                why = str(problem)
                continue
            times[member.host] = number
            for rank in ranks:
                holders[rank].append(member.host)
        if not times:
            raise NotLeft(why)
        made.standbys.extend(times)
        for rank, hosts in sorted(holders.items()):
            session = sessions.get(rank)
            if session is None:
                raise NotLeft(f"rank {rank} has ended meanwhile")
            made.workers.add(
                rank=rank, host=self._host_of(session), worker=session.worker.message(), holders=hosts
            )
        return times

    def _candidates(self) -> list[MemberLink]:
        """Who may be a standby: first those that are."""
        members = sorted(self._lead.members.values(), key=lambda one: (one.host not in self._times, one.host))
        return [one for one in members if not one.lost and one.connected.is_set() and self._lead.of(one)]

    @staticmethod
    def _is_for(member: MemberLink, session: Session | None, before: Collection[str]) -> bool:
        """Whether it keeps the image of that rank, beside the standbys before it."""
        return (
            session is not None
            and session.host != member.host
            and (not before or not session.host or session.host in before)
        )

    def _host_of(self, session: Session) -> str:
        return session.host or self._lead.here

    async def _dump(self, session: Session, path: Path) -> tuple[Taken, float]:
        """A worker of ours, into a file; how long it stood still.  Raises NotLeft."""
        if session.moving is not None or not session.relay or not session.active:
            raise NotLeft(f"the worker of rank {session.rank} cannot be dumped now")
        try:
            file = await asyncio.to_thread(ImageFile, path, self._job.name, session.rank)
            try:
                async with self._sources.image(session) as image:
                    async for part in image.parts:
                        await asyncio.to_thread(file.take, part)
                    paused_s = image.paused_s
                await asyncio.to_thread(file.finish)
            finally:
                await asyncio.to_thread(file.close)
        except (NotSent, BadImage, OSError) as problem:
            raise NotLeft(str(problem)) from problem
        return file.taken(), paused_s

    async def _send_image(self, member: MemberLink, set_id: str, session: Session, image: Taken) -> None:
        """Raises NotLeft."""
        first = pb.KeepImageRequest(
            set=set_id, number=self._count, described=self.described(session),
            **self._lead.credentials(),
        )  # fmt: skip

        async def requests() -> AsyncIterator[pb.KeepImageRequest]:
            yield first
            async for part in read_ahead(read_parts(image.path, image.header)):
                yield pb.KeepImageRequest(part=part)

        outgoing = Outgoing(requests())
        allowed = AT_LEAST_S + (image.header.image_bytes + image.header.log_bytes) / SLOWEST
        try:
            await self._ask(member, "KeepImage", aiter(outgoing), allowed)
        except NotLeft:
            if outgoing.problem is not None:
                raise NotLeft(str(outgoing.problem)) from outgoing.problem
            raise

    @staticmethod
    async def _ask(member: MemberLink, method: str, request: Any, within_s: float) -> None:
        """Raises NotLeft: it was not reached, and Declined."""
        try:
            reply = await member.ask(method, request, within_s)
        except NotDone as problem:
            raise NotLeft(str(problem)) from problem
        if reply.error:
            raise Declined(f"host {member.host}: {reply.error[:300]}")

    async def _release(self, but: pb.ReleaseImagesRequest) -> None:
        """No host needs images but these; one that is not reached is told with the next set."""
        for member in list(self._lead.members.values()):
            if member.lost or not member.connected.is_set():
                continue
            with contextlib.suppress(NotLeft):
                await self._ask(member, "ReleaseImages", but, RELEASE_S)

    # ------------------------------------------------------------------ keeping it so
    async def run(self) -> None:
        """Until cancelled."""
        complaints = Complaints("standbys")
        while True:
            await asyncio.sleep(LOOK_S)
            with complaints.survived(self._job.name):
                await self.look()

    async def look(self) -> None:
        """Once: whether the standbys still have what they keep, and the record what has happened."""
        if self._changing.locked() or not (self._times or self.record.kept):
            return
        async with self._changing:
            if not self.record.kept:
                return await self._void("its record has ended")
            gone = await self._gone()
            if len(gone) == len(self._times):
                return await self._void("; ".join(gone.values()) or "no other host keeps CPU images of it")
            leading = self._lead.span.leading
            if leading is None or not leading.holds.is_set():
                return
            if gone:
                await self._name_fewer(gone)
            await self.record.settle_known()

    async def _gone(self) -> dict[str, str]:
        """Standbys that do not have what they kept any more, and why."""
        gone = {}
        for host, times in list(self._times.items()):
            member = self._lead.members.get(host)
            if member is None or member.lost:
                gone[host] = f"host {host} takes no part in it any more"
            elif member.times != times and member.connected.is_set():  # its proxyd may have been started anew
                times = member.times
                try:
                    await self._ask(member, "ReleaseImages", self._only_named(self._named), RELEASE_S)
                    self._times[host] = times
                except Declined as problem:
                    gone[host] = str(problem)
                except NotLeft as problem:
                    log.debug("a standby is asked again", job=self._job.name, problem=str(problem))
        return gone

    def _only_named(self, number: int) -> pb.ReleaseImagesRequest:
        """An order: only those sets are needed, up to that one, that the record names."""
        return pb.ReleaseImagesRequest(keep=self._images.id, number=number, **self._lead.credentials())

    async def _name_fewer(self, gone: Mapping[str, str]) -> None:
        images = pb.ImageSet()
        images.CopyFrom(self._images)
        times = {host: times for host, times in self._times.items() if host not in gone}
        del images.standbys[:]
        images.standbys.extend(times)
        for worker in images.workers:
            left = [host for host in worker.holders if host in times]
            del worker.holders[:]
            worker.holders.extend(left)
        log.warning("a job has a standby less", job=self._job.name, reason="; ".join(gone.values()))
        await self.record.name(images)
        self._images, self._times = images, times
        self._tell()
        self._lapse.fewer()

    async def void(self, why: str) -> None:
        """Nobody may lead the job on by the images that count so far: once this returns."""
        async with self._changing:
            await self._void(why)

    async def _void(self, why: str) -> None:
        named = bool(self._times)
        await self.record.end(why)
        self._times, self._images = {}, pb.ImageSet()
        self._tell()
        if named:
            log.warning("nobody would lead a job on", job=self._job.name, reason=why)
            self._lapse.none_left(why)

    def described(self, session: Session) -> pb.RankDescription:
        """A rank, of whichever host."""
        return self._sources.describe(session)

    def follow_predecessor(self, images: pb.ImageSet | None) -> None:
        """A proxyd before us led the job from here; `images`: those that are left here, if any are."""
        named = images if images is not None and images.standbys else None
        self.record.follow_predecessor(named)
        if named is not None:
            self._keep_standbys(named)

    def go_on(self, recorded: Recorded, images: pb.ImageSet) -> None:
        """A former leader's record goes on as ours: others that keep its images may lead next."""
        self.record.go_on(recorded.next, images, recorded.known)
        self._keep_standbys(images)

    def _keep_standbys(self, images: pb.ImageSet) -> None:
        self._images = images
        self._times = {host: 0 for host in images.standbys if host != self._lead.here}  # they will be asked
        self._tell()

    def _tell(self) -> None:
        self._lead.span.standbys = self.hosts

    def close(self) -> None:
        """The job is over: nobody needs to lead it on."""
        self._times = {}
        self._tell()
        self.record.close()
