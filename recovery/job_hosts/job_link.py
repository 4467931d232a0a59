"""Service JobLink: what leaders and members of jobs on several hosts ask each other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc

from understudy.recovery.base.background import to_its_end
from understudy.recovery.base.control import pb, rpc
from understudy.recovery.base.errors import Refused
from understudy.recovery.membership.network.links import caller
from understudy.recovery.spanning.member.kept_images import NotKept
from understudy.recovery.spanning.member.member import MemberSide, NotAdmitted

if TYPE_CHECKING:
    from understudy.recovery.job_hosts.spans import Spans


class JobLinkService(rpc.JobLinkServicer):  # type: ignore[misc]
    """Over the network."""

    def __init__(self, spans: Spans, member: MemberSide) -> None:
        self._spans = spans
        self._member = member

    async def JoinJob(self, request: Any, context: Any) -> pb.JoinJobReply:
        try:
            return await self._spans.take_in(self._spans.led(request), caller(context), request)
        except NotAdmitted as problem:
            return pb.JoinJobReply(error=str(problem))

    async def BeginRank(self, request: Any, context: Any) -> pb.BeginRankReply:
        try:
            return await self._spans.let_begin(self._spans.led(request), caller(context), request)
        except NotAdmitted as problem:
            return pb.BeginRankReply(error=str(problem))

    async def EndRank(self, request: Any, context: Any) -> pb.EndRankReply:
        try:
            return self._spans.let_end(self._spans.led(request), caller(context), request)
        except NotAdmitted as problem:
            return pb.EndRankReply(error=str(problem))

    async def AskMove(self, request: Any, context: Any) -> pb.DrillReply:
        try:
            lead = self._spans.led(request)
            work = self._spans.move_for_member(lead, caller(context), request)
            return pb.DrillReply(detail=await to_its_end(work))
        except (NotAdmitted, Refused) as problem:
            return pb.DrillReply(error=str(problem))

    async def LeaveJob(self, request: Any, context: Any) -> pb.JobReport:
        try:
            return self._spans.report(request)
        except NotAdmitted as problem:
            return pb.JobReport(error=str(problem))

    async def FollowRanks(self, request: Any, context: Any) -> AsyncIterator[pb.MemberNews]:
        try:
            async for news in self._member.follow(request, caller(context)):
                yield news
        except NotAdmitted as problem:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(problem))

    async def MoveRank(self, request: Any, context: Any) -> pb.MoveRankReply:
        try:
            return await to_its_end(self._member.move(request))  # once begun it comes to an end
        except NotAdmitted as problem:
            return pb.MoveRankReply(error=str(problem))

    async def Steer(self, request: Any, context: Any) -> pb.SteerReply:
        try:
            return await self._member.steer(request)
        except NotAdmitted as problem:
            return pb.SteerReply(error=str(problem))

    async def ReplaceServer(self, request: Any, context: Any) -> pb.ReplaceServerReply:
        try:
            return await to_its_end(self._member.replace(request))  # likewise
        except NotAdmitted as problem:
            return pb.ReplaceServerReply(error=str(problem))

    async def EndServer(self, request: Any, context: Any) -> pb.EndServerReply:
        try:
            return await self._member.end_server(request)
        except NotAdmitted as problem:
            return pb.EndServerReply(error=str(problem))

    async def WriteParts(self, request: Any, context: Any) -> AsyncIterator[pb.WrittenPart]:
        try:
            async for part in self._member.write_parts(request):
                yield part
        except NotAdmitted as problem:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(problem))

    async def ConcludeSet(self, request: Any, context: Any) -> pb.EndServerReply:
        try:
            return self._member.conclude_set(request)
        except NotAdmitted as problem:
            return pb.EndServerReply(error=str(problem))

    async def TakeImage(self, request: Any, context: Any) -> AsyncIterator[pb.ImagePart]:
        try:
            async for part in self._member.take_image(request):
                yield part
        except NotAdmitted as problem:
            yield pb.ImagePart(error=str(problem))

    async def KeepImage(self, request_iterator: Any, context: Any) -> pb.KeepReply:
        try:
            await self._member.keep_image(aiter(request_iterator))
        except (NotAdmitted, NotKept) as problem:
            return pb.KeepReply(error=str(problem))
        return pb.KeepReply()

    async def ReleaseImages(self, request: Any, context: Any) -> pb.KeepReply:
        try:
            self._member.release_images(request)
        except (NotAdmitted, NotKept) as problem:
            return pb.KeepReply(error=str(problem))
        return pb.KeepReply()

    async def SignalRank(self, request: Any, context: Any) -> pb.EndServerReply:
        try:
            return await self._member.signal(request)
        except NotAdmitted as problem:
            return pb.EndServerReply(error=str(problem))
