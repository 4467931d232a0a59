"""What a member asks of the host that leads its job."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc
import structlog

from understudy.recovery.base.control import answer, pb, rpc, trouble
from understudy.recovery.base.errors import Refused
from understudy.recovery.membership.network.links import Links, NoLink
from understudy.recovery.state.jobs import Job
from understudy.recovery.state.span import Span

log = structlog.get_logger()

JOIN_S = 20.0
"""How long a member waits for the leader to have opened the job, or to be known."""
AGAIN_S = 0.2
ASK_S = 10.0
OPEN_S = 150.0
"""A rank of a member waits so long for a recovery to end before it opens."""


class LeaderLink:
    """Asks the leaders of the jobs that other hosts lead."""

    def __init__(self, links: Links, ways: Mapping[str, str]) -> None:
        """`ways`: Settings.gpu_ways of this host."""
        self._links, self._ways = links, dict(ways)

    async def leads_no_more(self, job: Job) -> str:
        """Why the leader of a job is none, if it says so itself; to be asked is to be reminded of us."""
        assert job.span is not None
        request = self._request(job.name, job.span)
        try:
            reply = await answer(self._stub(job.span).JoinJob(request, timeout=ASK_S))
        except (grpc.RpcError, NoLink):
            return ""
        return str(reply.error)

    async def join(self, name: str, span: Span) -> pb.JoinJobReply:
        """The job that another host leads; raises Refused."""
        deadline = asyncio.get_running_loop().time() + JOIN_S
        request = self._request(name, span)
        while True:
            try:
                reply: pb.JoinJobReply = await self.ask(name, span, "JoinJob", request, ASK_S)
                return reply
            except Refused as problem:
                if asyncio.get_running_loop().time() > deadline:
                    raise Refused(f"host {span.leader} lets nobody into job {name}: {problem}") from problem
            await asyncio.sleep(AGAIN_S)

    def _request(self, name: str, span: Span) -> pb.JoinJobRequest:
        return pb.JoinJobRequest(job=name, token=span.token, hosts=span.hosts, **self._ways)

    def _stub(self, span: Span) -> rpc.JobLinkStub:
        """Raises NoLink."""
        return rpc.JobLinkStub(self._links.to(span.leader))

    async def ask(self, job: str, span: Span, method: str, request: Any, within_s: float) -> Any:
        """Its answer, which is no error; raises Refused."""
        try:
            reply = await answer(getattr(self._stub(span), method)(request, timeout=within_s))
        except (grpc.RpcError, NoLink) as problem:
            why = trouble(problem) if isinstance(problem, grpc.RpcError) else str(problem)
            raise Refused(f"host {span.leader}, which leads job {job}: {why}") from problem
        if reply.error:
            raise Refused(reply.error)
        return reply

    async def begin_rank(self, job: str, span: Span, rank: int, world: int) -> pb.BeginRankReply:
        """Before it opens here; raises Refused."""
        request = pb.BeginRankRequest(job=job, token=span.token, rank=rank, world=world)
        reply: pb.BeginRankReply = await self.ask(job, span, "BeginRank", request, OPEN_S)
        return reply

    async def end_rank(self, job: str, span: Span, rank: int, opened: pb.RankDescription | None) -> None:
        """It has opened, or not; raises Refused."""
        request = pb.EndRankRequest(job=job, token=span.token, rank=rank, opened=opened)
        await self.ask(job, span, "EndRank", request, ASK_S)

    async def leave(self, job: Job, span: Span) -> pb.JobReport | None:
        """The job is over here; the leader's report, if it gave one."""
        request = pb.LeaveJobRequest(job=job.name, token=span.token)
        try:
            return await answer(self._stub(span).LeaveJob(request, timeout=ASK_S))
        except (grpc.RpcError, NoLink) as problem:
            log.warning("no report of a job's leader", job=job.name, problem=str(problem))
            return None
