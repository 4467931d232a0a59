"""What a job's leader may ask of a member: to tell of its ranks, and to steer their device servers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import structlog
from google.protobuf.message import DecodeError

from understudy import replay
from understudy.protos import control_pb2 as pb
from understudy.recovery.agent_api.commands import NoPlace, NotDone, command_named
from understudy.recovery.agent_api.server import Server
from understudy.recovery.base.errors import Refused
from understudy.recovery.config.settings import Settings
from understudy.recovery.host.placement import HostPlacement
from understudy.recovery.machine.processes import Watched
from understudy.recovery.migration.process.imaging import Image
from understudy.recovery.migration.transfer.reception import NotSent
from understudy.recovery.spanning.member.deputy import Deputy
from understudy.recovery.spanning.ranks.description import description
from understudy.recovery.spanning.ranks.in_turn import Outdated
from understudy.recovery.state.jobs import Job, Session
from understudy.recovery.state.taking_over import keep_one_server

log = structlog.get_logger()

LONGEST_S = 900.0
MOVING_S = 60.0
"""How long a move that is under way already may keep another one waiting, seconds."""
NO_MEMBER = "this host is no member of such a job"
SIGNALS = frozenset((signal.SIGKILL, signal.SIGSTOP))


class NotAdmitted(Exception):
    """Its text says why."""


class Workers(Protocol):
    """What carries workers of this host away."""

    async def send_for_leader(
        self, job: Job, session: Session, destination: str, keep_source: bool, device: str
    ) -> pb.Transfer:
        """A rank's worker to another host; raises Refused."""

    def image(self, session: Session) -> AbstractAsyncContextManager[Image]:
        """An image of a rank's worker, which runs on; raises NotSent."""


class MemberSide:
    """Answers the leaders of jobs that other hosts lead."""

    def __init__(
        self,
        jobs: Mapping[str, Job],
        deputies: Mapping[str, Deputy],
        settings: Settings,
        placement: HostPlacement,
        follow: Callable[[Session], None],
        close_if_unused: Callable[[Job], None],
        note: Callable[[], None],
        workers: Workers,
    ) -> None:
        """`follow` watches a rank's new server, `close_if_unused` ends a job that has nothing here any more.

        `note`: what has changed has consequences from here on.
        """
        self._jobs, self._deputies = jobs, deputies
        self._settings, self._placement, self._workers = settings, placement, workers
        self._watch_server, self._close_if_unused, self._note = follow, close_if_unused, note

    async def follow(self, request: pb.FollowRanksRequest, leader: str) -> AsyncIterator[pb.MemberNews]:
        """`leader`: the host that asks, perhaps a standby of the one before.  Raises NotAdmitted."""
        known = self._deputies.get(request.job)
        newer = known is not None and 0 < known.newest_leadership < request.leadership
        job, deputy = self._admit(request)
        assert job.span is not None
        if leader and leader != job.span.leader:
            log.warning("another host leads", job=job.name, host=leader, former=job.span.leader)
            job.span.leader = leader
            self._note()
        if newer and not request.knows:  # it knows nothing of what its predecessor left behind
            deputy.led_anew()
            self.end_left_behind(job, deputy)
            self._keep_one_server_each(job)
        here = [session for session in job.sessions.values() if session.state != "ended"]
        present = [*(session.rank for session in here), *deputy.ended]
        first = pb.MemberNews(whole=True, present=present)
        follower, latest = deputy.follow()
        yield first
        for session in here:  # one by one: a message has its limit
            if session.state != "ended":
                yield pb.MemberNews(described=[self.describe(session)])
        for message in latest:
            yield message
        while (news := await deputy.next(follower)) is not None:
            for message in news:
                yield message

    def end_left_behind(self, job: Job, deputy: Deputy) -> None:
        """Servers of ranks that have gone elsewhere."""
        while deputy.left_behind:
            self._placement.retire(deputy.left_behind.popitem()[1])
        self._close_if_unused(job)

    def _keep_one_server_each(self, job: Job) -> None:
        """A leader that follows another does not know of two."""
        for session in job.sessions.values():
            if session.state != "ended":
                keep_one_server(session, self._placement.retire)
        self._note()

    def describe(self, session: Session) -> pb.RankDescription:
        """All that a leader must know of a rank that it does not know yet."""
        deputy = self._deputies[session.job.name]
        whole = deputy.whole(session, anew=True)
        return description(session, self._settings, whole, parked=deputy.is_steered(session))

    async def steer(self, request: pb.SteerRequest) -> pb.SteerReply:
        """Raises NotAdmitted."""
        job, deputy = self._admit(request)
        behind = deputy.left_behind.get(request.rank)
        if request.method == "WriteState" and behind is not None and _is(request.server, behind.process):
            return (await self._told(behind, request, self._order(request)))[0]
        session = self._session(job, request.rank)
        try:
            if request.orders:
                replay.apply_control_orders(session.log, request.orders)
        except replay.LogError as problem:
            raise NotAdmitted(str(problem)) from problem
        if not request.method:
            return pb.SteerReply()
        server = self._server(session, request.server)
        message = self._order(request)
        if request.method == "Attach":
            message.log_directory = str(session.directory)
            message.worker.CopyFrom(session.worker.message())
        job.generation = max(job.generation, getattr(message, "generation", 0))
        deputy.steered(session, request.method, succeeded=False)
        if request.method == "Resume":
            session.resumed_commit = session.restored_commit  # even if no answer comes
            self._note()
        reply, given = await self._told(server, request, message)
        if given is not None:
            succeeded = not getattr(given, "error", "")
            deputy.steered(session, request.method, succeeded=succeeded)
            if request.method == "Restore" and succeeded:
                session.restored_commit = message.commit
                session.rolled_commit = message.commit if message.HasField("roll_forward") else 0
            if request.method == "RebuildCommunicators":
                session.generation = message.generation
        reply.news.CopyFrom(deputy.whole(session))
        return reply

    @staticmethod
    def _order(request: pb.SteerRequest) -> Any:
        """What the device server is to be told; raises NotAdmitted."""
        command = command_named(request.method)
        if command is None or not command.across_hosts:
            raise NotAdmitted(f"{request.method!r} is nothing that a leader may ask of a device server")
        try:
            return command.message.FromString(request.request)
        except DecodeError:
            raise NotAdmitted(f"what {request.method} is to be told cannot be read") from None

    @staticmethod
    async def _told(server: Server, request: pb.SteerRequest, order: Any) -> tuple[pb.SteerReply, Any]:
        """How it is answered, and what the device server said; None: it did not."""
        timeout = min(max(request.timeout_s, 0.0), LONGEST_S)
        try:
            given = await server.execute(order, timeout)
        except NotDone as problem:
            return pb.SteerReply(error=str(problem), ran_out=problem.late), None
        return pb.SteerReply(reply=given.SerializeToString()), given

    async def replace(self, request: pb.ReplaceServerRequest) -> pb.ReplaceServerReply:
        """Raises NotAdmitted."""
        job, deputy = self._admit(request)
        try:
            async with deputy.replacing.turn(request.rank, (request.leadership, request.number)):
                return await self._replace(job, deputy, request)
        except Outdated as problem:
            return pb.ReplaceServerReply(error=str(problem))
        except NoPlace as problem:
            homeless = self._placement.is_homeless(self._session(job, request.rank))
            return pb.ReplaceServerReply(error=str(problem), homeless=homeless)

    async def _replace(
        self, job: Job, deputy: Deputy, request: pb.ReplaceServerRequest
    ) -> pb.ReplaceServerReply:
        """Raises NotAdmitted, NoPlace."""
        session = self._session(job, request.rank)
        other, session.source_server = session.source_server, None
        if other is not None and _is(request.former, other.process):  # whoever replaced it was never heard of
            session.server, other = other, session.server
        if other is not None and other is not session.server:
            self._placement.retire(other)
        server = await self._placement.replacement(session, request.stash)
        if session.state == "ended":
            self._placement.retire(server)
            raise NotAdmitted(f"rank {request.rank} does not run here any more")
        session.server, session.lacks_state, session.rolled_commit = server, True, 0
        server.generation = job.generation
        deputy.replaced(session)
        self._watch_server(session)
        return pb.ReplaceServerReply(
            server=server.process.message(), device=session.device, device_index=session.device_index,
            data_address=server.data_address, socket=str(server.socket),
        )  # fmt: skip

    async def end_server(self, request: pb.EndServerRequest) -> pb.EndServerReply:
        """Raises NotAdmitted."""
        job, deputy = self._admit(request)
        behind = deputy.left_behind.get(request.rank)
        if behind is not None and _is(request.server, behind.process):
            self._placement.retire(deputy.left_behind.pop(request.rank))
            self._close_if_unused(job)
            return pb.EndServerReply()
        session = self._session(job, request.rank)
        server = self._server(session, request.server)
        if server is session.source_server:
            session.source_server = None
        if server is session.server:
            server.retired = True
            await server.process.end(0.0)
        else:
            self._placement.retire(server)
        return pb.EndServerReply()

    async def move(self, request: pb.MoveRankRequest) -> pb.MoveRankReply:
        """Raises NotAdmitted."""
        job, _ = self._admit(request)
        session = self._session(job, request.rank)
        if session.moving is not None:  # as a leader wished that has died: this one would ask again and again
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(session.moving.wait(), MOVING_S)
            if self._session(job, request.rank) is not session:
                raise NotAdmitted(f"rank {request.rank} has been away meanwhile")
        try:
            transfer = await self._workers.send_for_leader(
                job, session, request.destination, request.stash, request.device
            )
        except Refused as refusal:
            return pb.MoveRankReply(error=str(refusal))
        return pb.MoveRankReply(transfer=transfer)

    async def signal(self, request: pb.SignalRankRequest) -> pb.EndServerReply:
        """Raises NotAdmitted."""
        job, _ = self._admit(request)
        session = self._session(job, request.rank)
        if request.number not in SIGNALS:
            raise NotAdmitted(f"signal {request.number} is none that a leader may send")
        if _is(request.process, session.worker):
            session.worker.send(signal.Signals(request.number))
        else:
            server = self._server(session, request.process)
            session.killed_ns = time.monotonic_ns() if server is session.server else session.killed_ns
            server.process.send(signal.Signals(request.number))
        return pb.EndServerReply()

    async def write_parts(self, request: pb.WritePartsRequest) -> AsyncIterator[pb.WrittenPart]:
        """Raises NotAdmitted."""
        job, deputy = self._admit(request)
        sessions = [self._session(job, rank) for rank in sorted(set(request.ranks))]
        if not sessions:
            raise NotAdmitted("of no rank there is nothing to write")
        try:
            async for part in deputy.parts.write(request, sessions):
                yield part
        except ValueError as problem:
            raise NotAdmitted(str(problem)) from problem

    def conclude_set(self, request: pb.ConcludeSetRequest) -> pb.EndServerReply:
        """Raises NotAdmitted."""
        _, deputy = self._admit(request)
        try:
            deputy.parts.conclude(request)
        except ValueError as problem:
            raise NotAdmitted(str(problem)) from problem
        return pb.EndServerReply()

    async def keep_image(self, requests: AsyncIterator[Any]) -> None:
        """Raises NotAdmitted, NotKept."""
        deputy, rest = await self._admit_first(requests)
        await deputy.kept_images.keep(rest)

    def release_images(self, request: pb.ReleaseImagesRequest) -> None:
        """Raises NotAdmitted, NotKept."""
        _, deputy = self._admit(request)
        deputy.kept_images.release(request)

    async def _admit_first(self, requests: AsyncIterator[Any]) -> tuple[Deputy, AsyncIterator[Any]]:
        """Admits a stream: its first message says who asks; raises NotAdmitted."""
        first = await anext(requests, None)
        if first is None:
            raise NotAdmitted("nothing was asked")
        _, deputy = self._admit(first)

        async def all_of_them() -> AsyncIterator[Any]:
            yield first
            async for request in requests:
                yield request

        return deputy, all_of_them()

    async def take_image(self, request: pb.TakeImageRequest) -> AsyncIterator[pb.ImagePart]:
        """Raises NotAdmitted."""
        job, deputy = self._admit(request)
        session, generation = self._session(job, request.rank), job.generation
        if session.moving is not None or not session.relay:
            raise NotAdmitted(f"the worker of rank {session.rank} cannot be dumped now")
        self._check_snapshot(session, request.serial)
        try:
            async with self._workers.image(session) as image:
                async for part in image.parts:
                    yield pb.ImagePart(part=part)
                    if not session.active or deputy.restoring or job.generation != generation:
                        raise NotAdmitted("a recovery came between")
                self._check_snapshot(session, request.serial)
                yield pb.ImagePart(paused_s=image.paused_s)
        except (NotSent, OSError, replay.LogError) as problem:
            yield pb.ImagePart(error=str(problem))

    def _check_snapshot(self, session: Session, serial: int) -> None:
        """That it is there, and the log behind it."""
        page = session.log
        offsets = [kept.commit.log_offset for kept in page.snapshots() if kept.serial == serial]
        if not offsets or page.freed_segments * page.segment_bytes > offsets[0]:
            raise NotAdmitted(f"rank {session.rank} has no snapshot {serial} any more, or no log behind it")

    def _admit(self, request: Any) -> tuple[Job, Deputy]:
        """Only who knows the job's token, and leads it in the newest way that we know of."""
        job = self._jobs.get(request.job)
        deputy = self._deputies.get(request.job)
        if job is None or job.span is None or deputy is None:
            raise NotAdmitted(NO_MEMBER)
        if not job.span.admits(request.token):
            raise NotAdmitted("that is not the token of the job")
        if not deputy.accept(request.leadership):
            raise NotAdmitted("another leader has followed")
        return job, deputy

    def _session(self, job: Job, rank: int) -> Session:
        session = job.sessions.get(rank)
        if session is None or session.state == "ended":
            raise NotAdmitted(f"rank {rank} does not run here any more")
        return session

    def _server(self, session: Session, process: pb.Process) -> Server:
        for server in (session.server, session.source_server):
            if server is not None and _is(process, server.process):
                return server
        raise NotAdmitted(f"process {process.pid} is no device server of rank {session.rank}")


def _is(process: pb.Process, known: Watched) -> bool:
    return (process.pid, process.start_ticks) == (known.pid, known.start_ticks)
