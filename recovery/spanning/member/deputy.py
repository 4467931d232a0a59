"""In place of a job's coordinator where another host leads: tells the leader, and does as it says."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from understudy.protos import control_pb2 as pb
from understudy.recovery.agent_api.server import Pace, Server
from understudy.recovery.host.leases import Leases
from understudy.recovery.planning.takeover.reports import RankReport
from understudy.recovery.spanning.member.kept_images import KeptImages
from understudy.recovery.spanning.member.member_parts import MemberParts
from understudy.recovery.spanning.ranks.in_turn import InTurn
from understudy.recovery.spanning.ranks.mirror import Feed
from understudy.recovery.state.jobs import SESSION_CLOSED, Job, Session
from understudy.recovery.state.journaled_job import departures
from understudy.recovery.state.taking_over import open_fault

BEAT_S = 0.02
"""Between two messages, if there is anything to tell."""
STILL_S = 0.2
"""If there is not: so often it is said that nothing has changed."""
ENOUGH_BYTES = 2 << 20
"""In one message; the next rank goes into another."""


class Deputy:
    """Stands in for the coordinator of one job."""

    def __init__(
        self, job: Job, leases: Leases, pace: Callable[[Server], Pace],
        describe: Callable[[Session], pb.RankDescription], parts: MemberParts, kept_images: KeptImages,
    ) -> None:  # fmt: skip
        self._job = job
        self._describe = describe
        self.parts = parts
        self.kept_images = kept_images
        self._leases = leases
        self._pace = pace
        self._feeds: dict[int, Feed] = {}
        self._steered: set[int] = set()
        self._at_barrier: set[int] = set()
        self._faults: dict[int, pb.FaultReport] = {}
        self._ended: dict[int, pb.RankEnd] = {}
        """Newest ends of ranks here, for a leader that comes back."""
        self._news = pb.MemberNews()
        self._woken = asyncio.Event()
        self._follower = 0
        self._over = False
        self.followed_at = time.monotonic()
        """When a leader was last there to hear."""
        self.newest_leadership = 0
        self.replacing = InTurn()
        """Device servers, as the leader wants it."""
        self.leaders = 0
        """How many have led it anew."""
        self.left_behind: dict[int, Server] = {}
        """Of ranks that have gone elsewhere."""

    # ------------------------------------------------------------------ as a coordinator
    @property
    def restoring(self) -> bool:
        """Whether the leader steers servers here."""
        return bool(self._steered)

    def accept(self, leadership: int) -> bool:
        """Whether no newer leader has asked; who asks so is the newest from here on."""
        if leadership < self.newest_leadership:
            return False
        self.newest_leadership = leadership
        return True

    def led_anew(self) -> None:
        """A leader has followed that knows nothing of what the one before had begun."""
        self.leaders += 1

    def stands(self, session: Session) -> bool:
        """Whether its server stands still on purpose: for the leader, or as it has told of a fault.

        The leader may be away for longer than a server that runs would be believed to.
        """
        return session.rank in self._at_barrier or session.rank in self._faults

    def server_died(self, session: Session) -> None:
        """A session's server has died: nothing of it runs any more."""
        if session.log.device_lost:
            self._leases.fence(session, session.log.device_message)
        self._add_news(session)
        self._news.servers_ended.append(server_end(session))
        self._woken.set()

    def tell(self, report: pb.FaultReport) -> None:
        """A device server's."""
        session = self._job.sessions.get(report.rank)
        if session is None or not session.active:
            return
        if report.kind == "validation":
            self._at_barrier.add(report.rank)
        self._faults[report.rank] = report
        self._add_news(session)
        self._news.faults.append(report)
        self._woken.set()

    def worker_left(self, session: Session) -> None:
        """Its worker ended, and its log is about to go."""
        news, last = self._feed(session).whole(session.rank), self._describe(session)
        end = pb.RankEnd(
            rank=session.rank, worker=session.worker.message(),
            clean=session.log.session_state == SESSION_CLOSED, message=session.log.lost_message,
        )  # fmt: skip
        self._news.ranks.append(news)
        self._news.workers_ended.append(end)
        self._ended[session.rank] = pb.RankEnd(last=last)
        self._ended[session.rank].MergeFrom(end)
        self._forget(session.rank)
        self._woken.set()

    async def cancel(self) -> None:
        """There is nothing to stop; what is to be told still is."""
        self.kept_images.close()
        self._over = True
        self._woken.set()

    # ------------------------------------------------------------------ as the leader wants it
    @property
    def ended(self) -> list[int]:
        """Ranks that ran here, and that nobody has opened here since."""
        here = [session.rank for session in self._job.sessions.values() if session.state != "ended"]
        return [rank for rank in self._ended if rank not in here]

    def moved_out(self, session: Session, left_behind: Server | None) -> None:
        """Its rank goes on elsewhere: the leader knows.  `left_behind`: who still has its state."""
        self._forget(session.rank)
        if left_behind is not None:
            self.left_behind[session.rank] = left_behind

    def arrived(self, session: Session) -> None:
        """From another host."""
        self._ended.pop(session.rank, None)
        self._news.described.append(self._describe(session))
        self._woken.set()

    def adopted(self, session: Session, account: pb.AdoptReply) -> None:
        """From a proxyd that died: whether its device server stands, and at what, for the leader to judge."""
        if account.parked:
            self._steered.add(session.rank)
        if account.fault.kind:
            self.tell(account.fault)

    def opened(self, session: Session) -> None:
        """A new session: how its rank ended before matters no more."""
        self._ended.pop(session.rank, None)

    def steered(self, session: Session, method: str, succeeded: bool) -> None:
        """The leader has had a device server do something."""
        rank = session.rank
        if method in ("Park", "Hold", "Attach", "Rewind", "Restore"):
            self._steered.add(rank)
            self._at_barrier.discard(rank)
            session.state = "recovering" if session.state == "running" else session.state
        if method in ("Rewind", "Restore", "Attach"):
            self._feed(session).went_back()
        if method == "Restore" and succeeded:
            session.lacks_state = False
        if method in ("Resume", "LetGo") and succeeded:
            self._steered.discard(rank)
            if method == "Resume":
                self._at_barrier.discard(rank)
                self._faults.pop(rank, None)
            session.state = "running" if session.state == "recovering" else session.state

    def replaced(self, session: Session) -> None:
        """It got another server."""
        self._faults.pop(session.rank, None)
        self._steered.add(session.rank)

    def whole(self, session: Session, *, anew: bool = False) -> pb.RankNews:
        """All there is to know of one rank; `anew`: by a leader that knows nothing of it."""
        return self._feed(session).whole(session.rank, anew=anew)

    def follow(self) -> tuple[int, list[pb.MemberNews]]:
        """Begin to tell a leader, who knows nothing: its number, and what goes behind the descriptions."""
        self._follower += 1
        self._news = pb.MemberNews()
        self.followed_at = time.monotonic()
        for feed in self._feeds.values():
            feed.begin()
        messages = [pb.MemberNews(workers_ended=[self._ended[rank]]) for rank in self.ended]
        told = departures(self._job, but=self._ended.keys())
        latest = pb.MemberNews(faults=self._faults.values(), departed=told, complete=True)
        for session in self._job.active_sessions():
            if not session.server.process.running:
                latest.servers_ended.append(server_end(session))
        return self._follower, [*messages, latest]

    async def next(self, follower: int) -> list[pb.MemberNews] | None:
        """What has happened since, or that nothing has; None once another one follows, or the job is over."""
        asked = time.monotonic()
        while follower == self._follower:
            with contextlib.suppress(TimeoutError):  # unlike wait_for, it never loses a cancellation
                async with asyncio.timeout(BEAT_S):
                    await self._woken.wait()
            self._woken.clear()
            if follower != self._follower:
                return None
            over = self._over
            self.followed_at = time.monotonic()
            news, self._news = self._news, pb.MemberNews()
            messages = [news]
            for session in self._job.sessions.values():
                if session.state == "ended":
                    continue
                told = self._told(session)
                if told.blocks or told.manifests:
                    if messages[0].ByteSize() > ENOUGH_BYTES:  # what ends goes last
                        messages.insert(0, pb.MemberNews())
                    messages[0].ranks.append(told)
            messages = [message for message in messages if message.ByteSize()]
            if not messages and not over and time.monotonic() - asked >= STILL_S:
                messages = [pb.MemberNews(still=True)]
            if messages:
                return messages
            if over:
                return None
        return None

    def report(self, session: Session) -> RankReport:
        """What there is of a rank here, for this host if it leads the job on."""
        return RankReport(
            session.rank, session.server.process.running, session.has_state and not session.rolling,
            parked=self.is_steered(session), fault=open_fault(self._faults.get(session.rank)),
            active=session.active,
        )  # fmt: skip

    def is_steered(self, session: Session) -> bool:
        """Whether a leader has had its server stand still."""
        return session.rank in self._steered

    def _told(self, session: Session) -> pb.RankNews:
        news = self._feed(session).news(session.rank)
        pace = self._pace(session.server)
        news.quiet_since_ns, news.stuck_ns = pace.quiet_since_ns, pace.stuck_ns
        news.moved_ns, news.migratable = pace.moved_ns, session.migratable
        return news

    def _add_news(self, session: Session) -> None:
        self._news.ranks.append(self._feed(session).whole(session.rank))

    def _feed(self, session: Session) -> Feed:
        if session.rank not in self._feeds:
            self._feeds[session.rank] = Feed(session.log)
        return self._feeds[session.rank]

    def _forget(self, rank: int) -> None:
        self._feeds.pop(rank, None)
        self._steered.discard(rank)
        self._at_barrier.discard(rank)
        self._faults.pop(rank, None)


def server_end(session: Session) -> pb.ServerEnd:
    """The end of the present server, as the leader is told of it."""
    server = session.server
    end = pb.ServerEnd(
        rank=session.rank, server=server.process.message(), killed_ns=session.killed_ns,
        noticed_ns=server.process.ended_ns or time.monotonic_ns(),
    )  # fmt: skip
    if (verdict := server.verdict) is not None:
        end.verdict, end.happened_ns, end.noticed_ns = (
            verdict.kind.value, verdict.happened_ns, verdict.noticed_ns,
        )  # fmt: skip
        end.evidence, end.counts = verdict.evidence, verdict.counts
    return end
