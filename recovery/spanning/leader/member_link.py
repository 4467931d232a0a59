"""A leader's connection to one of the other hosts of its job."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import TYPE_CHECKING, Any

import grpc
import structlog

from understudy import replay
from understudy.recovery.agent_api.commands import NotDone
from understudy.recovery.base.background import BackgroundTasks
from understudy.recovery.base.control import answer, code_of, pb, ran_out, rpc, trouble
from understudy.recovery.membership.network.links import NoLink
from understudy.recovery.planning.takeover.reports import RankReport
from understudy.recovery.spanning.member.member import NO_MEMBER

if TYPE_CHECKING:
    from understudy.recovery.spanning.leader.lead import Lead

log = structlog.get_logger()

AGAIN_S, LONGEST_AGAIN_S = 0.2, 2.0


class MemberLink:
    """One of the job's other hosts."""

    def __init__(self, lead: Lead, host: str) -> None:
        self.host = host
        self._lead = lead
        self.connected = asyncio.Event()
        self.heard = asyncio.Event()
        """It has told of all its ranks, or has none, or is lost."""
        self.trouble = "it has not been reached yet"
        self.hurry = asyncio.Event()
        """It has just become a member."""
        self._following: asyncio.Task[None] | None = None
        self.times = 0
        """How often it has been reached."""
        self.lost = ""
        """Why it is given up, if so."""
        self.reports: dict[int, RankReport] = {}
        """By rank, from the beginning of a conversation until all that was there has been told."""
        self.opened: set[int] = set()
        """Ranks that have opened there since the conversation was asked for: it may begin without them."""
        self.faults: dict[int, pb.FaultReport] = {}
        """By rank, the newest that it has told."""

    def begin(self, tasks: BackgroundTasks) -> None:
        """Follow it, for as long as these run."""
        self._following = tasks.start(self.follow())

    def stop(self) -> None:
        """Follow it no longer."""
        if self._following is not None:
            self._following.cancel()

    def give_up(self, why: str) -> None:
        """Nothing that we still have for it is to reach it."""
        self.lost = why
        self.connected.clear()

    def told_all(self, faults: dict[int, pb.FaultReport]) -> None:
        """It has told of its ranks, and at which faults their device servers stand."""
        self.reports.clear()
        self.faults = faults

    def stub(self) -> rpc.JobLinkStub:
        """Raises NoLink."""
        return rpc.JobLinkStub(self._lead.links.to(self.host))

    async def follow(self) -> None:
        """Until cancelled."""
        pause = AGAIN_S
        leading = self._lead.span.leading
        assert leading is not None
        while not self.lost:
            await leading.holds.wait()
            try:
                knows = self.times > 0
                self.opened.clear()
                request = pb.FollowRanksRequest(knows=knows, **self._lead.credentials())
                stream = self.stub().FollowRanks(request)
                async for news in stream:
                    self._lead.take(self, news)
                    if news.complete:
                        self.times += 1
                        log.info("follows", job=self._lead.job.name, host=self.host)
                        self.connected.set()
                    pause = AGAIN_S
                self.trouble = f"{self.host} has ended the conversation"
            except (grpc.RpcError, NoLink, replay.LogError) as problem:
                self.trouble = trouble(problem) if isinstance(problem, grpc.RpcError) else str(problem)
                code = code_of(problem) if isinstance(problem, grpc.RpcError) else None
                if code is grpc.StatusCode.PERMISSION_DENIED and self.trouble == NO_MEMBER:
                    self._lead.gone(self)
                if self.connected.is_set():
                    log.warning("a host of a job is not reached", job=self._lead.job.name, host=self.host,
                                problem=self.trouble)  # fmt: skip
            self.connected.clear()
            if _is_cancelled():  # grpc.aio may tell of that as of a call that failed
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self.hurry.wait()
            self.hurry.clear()
            pause = min(2 * pause, LONGEST_AGAIN_S)

    async def ask(self, method: str, request: Any, timeout: float) -> Any:
        """Raises NotDone."""
        with self._told_as_not_done():
            return await answer(getattr(self.stub(), method)(request, timeout=timeout))

    async def stream(self, method: str, request: Any, silent_s: float | None = None) -> AsyncGenerator[Any]:
        """What it answers, part by part, none later than that behind the one before.  Raises NotDone."""
        with self._told_as_not_done():
            call = getattr(self.stub(), method)(request)
            parts = aiter(call)
            try:
                while True:
                    async with asyncio.timeout(silent_s):
                        part = await anext(parts, None)
                    if part is None:
                        return
                    yield part
            finally:
                call.cancel()

    @contextlib.contextmanager
    def _told_as_not_done(self) -> Iterator[None]:
        try:
            yield
        except NoLink as problem:
            raise NotDone(str(problem)) from problem
        except TimeoutError as problem:
            raise NotDone(f"host {self.host} has fallen silent", late=True) from problem
        except grpc.RpcError as problem:
            raise NotDone(f"host {self.host}: {trouble(problem)}", late=ran_out(problem)) from problem


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
