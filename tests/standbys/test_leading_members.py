"""A leader and its members: what each knows of the other when ranks move, and when one begins anew."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import grpc.aio
import pytest
from led_job import SOON_S, TOKEN, Leader, Member, becomes, placement_of

from understudy.recovery.agent_api.commands import NoPlace, NotDone, command_named
from understudy.recovery.agent_api.server import AbsentServer
from understudy.recovery.base.control import answer, pb, rpc
from understudy.recovery.base.errors import Refused
from understudy.recovery.spanning.member.member import NotAdmitted
from understudy.recovery.state.jobs import SESSION_LOST, Job, Session
from understudy.recovery.text.status_text import status_lines
from understudy.recovery.text.view import view_of


def test_a_host_that_was_to_take_a_rank_and_has_not_takes_no_part_any_more(folder: Path) -> None:
    async def refuse(*_: object) -> pb.Transfer:
        raise Refused("its worker has locked a file")

    async def move() -> None:
        b, c = Member(folder, "b"), Member(folder, "c")
        b.open(1)
        b.workers.send_for_leader = refuse
        async with b, Leader(folder, {"b": b, "c": c}, known="b") as a:
            session = await a.hears_of(1)
            with pytest.raises(NotDone, match="locked a file"):
                await a.lead.relocations.move(session, "c", keep_source=False)
            assert a.span.members == set(a.lead.members) == {"b"}
            a.lead.join("c")
            with pytest.raises(NotDone, match="locked a file"):
                await a.lead.relocations.move(session, "c", keep_source=False)
            assert a.span.members == set(a.lead.members) == {"b", "c"}

    asyncio.run(move())


async def break_off(*_: object) -> pb.Transfer:
    raise RuntimeError("nobody knows how it went")


def test_a_host_where_a_rank_may_be_goes_on_taking_part(folder: Path) -> None:
    async def move() -> None:
        b, c = Member(folder, "b"), Member(folder, "c")
        b.open(1)
        b.workers.send_for_leader = break_off
        async with b, Leader(folder, {"b": b, "c": c}, known="b") as a:
            session = await a.hears_of(1)
            with pytest.raises(NotDone):
                await a.lead.relocations.move(session, "c", keep_source=False)
            assert a.span.members == set(a.lead.members) == {"b", "c"}

    asyncio.run(move())


@pytest.mark.parametrize("left", ["the job", "nothing"])
def test_a_rank_that_has_gone_while_nobody_heard_how_its_move_went_has_not_ended(
    folder: Path, left: str
) -> None:
    """Its former host may have closed the job with its last rank, and know nothing of it any more."""

    async def move() -> None:
        b, c = Member(folder, "b"), Member(folder, "c")
        there = b.open(1)
        b.workers.send_for_leader = break_off
        async with Leader(folder, {"b": b, "c": c}, known="b") as a:
            async with b:
                session = await a.hears_of(1)
                with pytest.raises(NotDone):
                    await a.lead.relocations.move(session, "c", keep_source=False)
            del there.job.sessions[1]
            link = a.lead.members["b"]
            await becomes(lambda: not link.connected.is_set())
            if left == "nothing":
                b.jobs.clear()
                b.deputies.clear()
                link.heard.clear()
            async with b:
                await becomes((link.connected if left == "the job" else link.heard).is_set)
                assert session.worker.running and a.span.destinations == {"c"}
                c.open(1)
                async with c:
                    await becomes(lambda: session.host == "c")
                    assert session.worker.running and not a.span.destinations

    asyncio.run(move())


def test_what_cannot_be_read_is_not_steered_by(folder: Path) -> None:
    async def steer() -> pb.SteerReply:
        b = Member(folder, "b")
        server = b.open(1).server.process.message()
        request = pb.SteerRequest(
            job="j", token=TOKEN, leadership=1, rank=1, server=server, method="Park", request=b"\xff"
        )
        async with b, grpc.aio.insecure_channel(b.socket) as channel:
            return await answer(rpc.JobLinkStub(channel).Steer(request, timeout=10))

    assert asyncio.run(steer()).error == "what Park is to be told cannot be read"


def test_a_leader_that_comes_back_plans_once_members_that_had_ranks_have_told_of_them(folder: Path) -> None:
    async def come_back() -> None:
        b, c = Member(folder, "b"), Member(folder, "c")
        b.open(1)
        async with Leader(folder, {"b": b, "c": c}, known="bc", awaited="b") as a:
            ready = asyncio.create_task(placement_of(a).ready([], suspicious=False))
            await becomes(lambda: "yet" not in a.lead.members["b"].trouble or ready.done())
            assert not ready.done()
            async with b:  # c is not reached at all, and had no rank
                await asyncio.wait_for(ready, SOON_S)
                assert a.job.sessions.keys() == {1} and not a.span.awaited

    asyncio.run(come_back())


def test_who_is_awaited_is_told_until_all_are_there_or_lost(folder: Path) -> None:
    async def wait() -> None:
        b, c = Member(folder, "b"), Member(folder, "c")
        b.open(1)
        async with b, Leader(folder, {"b": b, "c": c}, known="bc") as a:
            session = await a.hears_of(1)
            assert a.span.leading is not None
            a.span.leading.holds.clear()
            session.host = "c"  # which is not reached
            ready = asyncio.create_task(placement_of(a).ready([session], suspicious=False))
            await becomes(lambda: "does not lead" in a.job.waits_for)
            assert "host c is not reached" in a.job.waits_for
            assert "a recovery waits: " in str(list(status_lines(view_of(status_of(a.job), 0), 200)))
            a.span.leading.holds.set()
            await becomes(lambda: "lead" not in a.job.waits_for)
            assert not ready.done()
            a.lead.members["c"].lost = "the others agree"
            await asyncio.wait_for(ready, SOON_S)
            assert not a.job.waits_for

    asyncio.run(wait())


def status_of(job: Job) -> pb.Status:
    return pb.Status(jobs=[job.status()])


def test_the_end_of_a_rank_is_told_to_a_leader_that_was_away_when_it_came(folder: Path) -> None:
    async def come_back() -> None:
        b = Member(folder, "b")
        session = b.open(1)
        session.log.lose("its program failed")
        b.end(session)
        async with b, Leader(folder, {"b": b}, known="b", awaited="b") as a:
            told = await a.hears_of(1)
            assert not told.worker.running and told.log.session_state == SESSION_LOST

    asyncio.run(come_back())


def test_how_a_rank_ended_matters_no_more_once_it_was_opened_anew_and_has_moved_away(folder: Path) -> None:
    async def come_back() -> None:
        b = Member(folder, "b")
        b.end(b.open(1))
        session = b.open(1)
        deputy = b.takes_part()
        deputy.opened(session)
        deputy.moved_out(session, None)
        del session.job.sessions[1]
        async with b, Leader(folder, {"b": b}, known="b") as a:
            await becomes(a.lead.members["b"].connected.is_set)
            assert not a.job.sessions

    asyncio.run(come_back())


async def steer(session: Session, method: str, request: Any) -> None:
    command = command_named(method)
    assert command is not None and isinstance(request, command.message)
    await session.server.execute(request, SOON_S)


ROLLED = pb.RestoreRequest(commit=3, roll_forward=pb.RollForward(rolled=[1]))
PREPARED = {
    "parked": [("Park", pb.ParkRequest())],
    "attached": [("Attach", pb.AttachRequest())],
    "restored": [("Attach", pb.AttachRequest()), ("Restore", pb.RestoreRequest(commit=3))],
    "rolled": [("Attach", pb.AttachRequest()), ("Restore", ROLLED), ("Resume", pb.ResumeRequest())],
}


@pytest.mark.parametrize("how", PREPARED)
def test_a_rank_that_a_leader_has_not_brought_to_go_on_is_told_to_each_that_follows(
    folder: Path, how: str
) -> None:
    async def follow() -> None:
        b = Member(folder, "b")
        b.open(1)
        async with b:
            async with Leader(folder, {"b": b}, known="b") as a:
                session = await a.hears_of(1)
                assert not a.agent.told
                if how != "parked":
                    session.server = await a.lead.replace(session, keep_source=False)
                for method, request in PREPARED[how]:
                    await steer(session, method, request)
            for _ in range(2):
                async with Leader(folder, {"b": b}, known="b", awaited="b") as a:
                    session = await a.hears_of(1)
                    await becomes(a.lead.members["b"].connected.is_set)
                    assert [(fault.kind, fault.rank) for fault in a.agent.told] == [("collective", 1)]
                    assert session.has_state == (how in ("parked", "restored"))

    asyncio.run(follow())


@pytest.mark.parametrize("kind", ["call", "suspect", "restart", "collective", "validation"])
def test_a_leader_that_follows_is_told_once_why_a_parked_rank_stands_and_as_of_its_own_generation(
    folder: Path, kind: str
) -> None:
    """Its server may have been prepared since for a newer generation than that in which it came to stand."""

    async def follow() -> None:
        b = Member(folder, "b")
        there = b.open(1)
        async with b:
            async with Leader(folder, {"b": b}, known="b") as a:
                session = await a.hears_of(1)
                b.takes_part().tell(pb.FaultReport(job="j", rank=1, generation=3, kind=kind))
                await becomes(lambda: bool(a.agent.told))
                await steer(session, "Park", pb.ParkRequest())
                await steer(session, "RebuildCommunicators", pb.RebuildRequest(generation=4))
                assert there.job.generation == 4  # if this host leads the job on, the next one is the fifth
            async with Leader(folder, {"b": b}, known="b", awaited="b") as a:
                await becomes(lambda: bool(a.agent.told))
                await becomes(a.lead.members["b"].connected.is_set)
                [told] = a.agent.told
                assert told.kind == ("collective" if kind == "validation" else kind)
                assert told.generation == there.generation == 4

    asyncio.run(follow())


@pytest.mark.parametrize("kind", ["call", "validation"])
def test_a_fault_that_is_being_dealt_with_is_not_told_again_when_the_link_was_broken_meanwhile(
    folder: Path, kind: str
) -> None:
    """It would count twice: a call that fails for the third time ends the job."""

    async def break_link() -> None:
        b = Member(folder, "b")
        b.open(1)
        async with Leader(folder, {"b": b}, known="b") as a:
            for generation in (0, 1):
                async with b:
                    await becomes(lambda: a.lead.members["b"].connected.is_set())
                    b.takes_part().tell(pb.FaultReport(job="j", rank=1, generation=generation, kind=kind))
                    await becomes(lambda: len(a.agent.told) > generation)  # noqa: B023
                await becomes(lambda: not a.lead.members["b"].connected.is_set())
            async with b:
                await becomes(lambda: a.lead.members["b"].connected.is_set())
            assert [fault.generation for fault in a.agent.told] == [0, 1]

    asyncio.run(break_link())


@pytest.mark.parametrize("kind", ["call", "suspect", "restart", "collective", "validation"])
def test_a_server_that_has_told_of_a_fault_stands_on_purpose_until_its_rank_goes_on(
    folder: Path, kind: str
) -> None:
    """While the leader is away, the watch of its host would take it for one that hangs, and end it."""

    async def wait() -> None:
        b = Member(folder, "b")
        there, deputy = b.open(1), b.takes_part()
        assert not deputy.stands(there)
        deputy.tell(pb.FaultReport(job="j", rank=1, kind=kind))
        assert deputy.stands(there)
        deputy.steered(there, "Resume", succeeded=False)
        assert deputy.stands(there)
        deputy.steered(there, "Resume", succeeded=True)
        assert not deputy.stands(there)

    asyncio.run(wait())


def test_a_member_says_that_nothing_is_new(folder: Path) -> None:
    """Else who hears nothing could not know whether it is reached."""

    async def listen() -> None:
        b = Member(folder, "b")
        b.open(1)
        async with b, Leader(folder, {"b": b}, known="b") as a:
            server = (await a.hears_of(1)).server
            for _ in range(3):
                before = server.heard_ns
                await becomes(lambda: server.heard_ns > before)  # noqa: B023

    asyncio.run(listen())


def test_a_rank_whose_server_has_died_is_told_of_by_that_alone(folder: Path) -> None:
    async def follow() -> None:
        b = Member(folder, "b")
        there = b.open(1)
        b.takes_part().tell(pb.FaultReport(job="j", rank=1, kind="call"))
        cast(Any, there.server.process).hear_of_end()
        async with b, Leader(folder, {"b": b}, known="b", awaited="b") as a:
            await becomes(lambda: "b" in a.lead.members and a.lead.members["b"].connected.is_set())
            assert not a.job.sessions[1].server.process.running and not a.agent.told

    asyncio.run(follow())


def test_a_leader_that_follows_knows_from_where_on_a_restored_server_has_its_memory(folder: Path) -> None:
    async def follow() -> None:
        b = Member(folder, "b")
        b.open(1)
        async with b:
            async with Leader(folder, {"b": b}, known="b") as a:
                session = await a.hears_of(1)
                await steer(session, "Restore", pb.RestoreRequest(commit=3))
                await steer(session, "Resume", pb.ResumeRequest())
            async with Leader(folder, {"b": b}, known="b") as a:
                session = await a.hears_of(1)
                assert (session.restored_commit, session.resumed_commit) == (3, 3)
                assert not a.agent.told

    asyncio.run(follow())


def test_a_rank_that_has_come_to_a_host_and_has_no_server_yet_counts_as_one_whose_server_died(
    folder: Path,
) -> None:
    async def follow() -> None:
        b = Member(folder, "b")
        session = b.open(1)
        session.server, session.lacks_state = AbsentServer("cpu:0"), True
        async with b:
            for _ in range(2):
                async with Leader(folder, {"b": b}, known="b") as a:
                    server = (await a.hears_of(1)).server
                    assert not server.process.running and not server.retired

    asyncio.run(follow())


@pytest.mark.parametrize("keep_source", [False, True], ids=["at once", "copied from"])
def test_a_server_that_nobody_has_heard_of_is_ended_when_its_rank_gets_another(
    folder: Path, keep_source: bool
) -> None:
    async def replace() -> None:
        b = Member(folder, "b")
        there = b.open(1)
        former: Any = there.server
        b.placement.gate.clear()
        async with b, Leader(folder, {"b": b}, known="b") as a:
            session = await a.hears_of(1)
            given_up = asyncio.create_task(a.lead.replace(session, keep_source))
            await becomes(lambda: len(b.placement.made) == 1)
            given_up.cancel()
            await asyncio.wait({given_up})
            again = asyncio.create_task(a.lead.replace(session, keep_source))
            b.placement.gate.set()
            server = await asyncio.wait_for(again, SOON_S)
            first, second = b.placement.made
            assert server.pid == there.server.process.pid == second.process.pid
            assert first in b.placement.retired and second not in b.placement.retired
            assert (there.source_server, former in b.placement.retired) == (
                (former, False) if keep_source else (None, True)
            )

    asyncio.run(replace())


def test_a_request_for_a_server_that_a_newer_one_has_overtaken_does_nothing(folder: Path) -> None:
    async def replace() -> None:
        b = Member(folder, "b")
        there = b.open(1)
        former: Any = there.server
        async with b, Leader(folder, {"b": b}, known="b") as a:
            await a.hears_of(1)
            request = pb.ReplaceServerRequest(
                rank=1, number=7, former=former.process.message(), **a.lead.credentials()
            )
            assert not (await b.side.replace(request)).error
            request.number = 6
            assert "newer request" in (await b.side.replace(request)).error
            assert [there.server] == b.placement.made

    asyncio.run(replace())


@pytest.mark.parametrize("goes", [True, False])
def test_a_move_waits_for_one_that_is_under_way(folder: Path, goes: bool) -> None:
    """A leader that follows one that died amid a move asked in pauses of up to 16 s."""
    sent: list[str] = []

    async def send(
        job: Job, session: Session, destination: str, keep_source: bool, device: str
    ) -> pb.Transfer:
        sent.append(destination)
        return pb.Transfer(destination=destination)

    async def move() -> None:
        b = Member(folder, "b")
        there = b.open(1)
        b.workers.send_for_leader = send
        async with b, Leader(folder, {"b": b}, known="b") as a:
            await a.hears_of(1)
            request = pb.MoveRankRequest(rank=1, destination="c", **a.lead.credentials())
            there.moving = asyncio.Event()
            asked = asyncio.create_task(b.side.move(request))
            for _ in range(3):
                await asyncio.sleep(0)
            assert not asked.done() and not sent
            there.moving.set()
            there.moving = None
            if goes:
                del there.job.sessions[1]
                with pytest.raises(NotAdmitted, match="rank 1 does not run here any more"):
                    await asked
                there.job.sessions[1] = there
            else:
                assert not (await asked).error and sent == ["c"]

    asyncio.run(move())


def test_a_server_that_is_copied_from_lives_on_if_another_could_not_be_had_at_first(folder: Path) -> None:
    async def replace() -> None:
        b = Member(folder, "b")
        there = b.open(1)
        former: Any = there.server
        b.placement.problem = "no device server became ready"
        async with b, Leader(folder, {"b": b}, known="b") as a:
            session = await a.hears_of(1)
            with pytest.raises(NotDone, match="became ready"):
                await a.lead.replace(session, keep_source=True)
            b.placement.problem = ""
            await a.lead.replace(session, keep_source=True)
            assert there.source_server is former and not b.placement.retired

    asyncio.run(replace())


@pytest.mark.parametrize("homeless", [True, False])
def test_a_rank_whose_host_has_no_gpu_for_it_any_more_needs_another_one(folder: Path, homeless: bool) -> None:
    """Its own host finds that out by a trial, or is told by NVML; the leader only hears of it."""

    async def replace() -> None:
        b = Member(folder, "b")
        b.open(1)
        b.placement.problem, b.placement.homeless = "cuda:0 of rank 1 is gone, and no other is free", homeless
        async with b, Leader(folder, {"b": b}, known="b") as a:
            session = await a.hears_of(1)
            placement = placement_of(a)
            assert not placement.is_homeless(session)
            with pytest.raises(NoPlace, match="is gone, and no other is free"):
                await placement.replacement(session, keep_source=False)
            assert placement.is_homeless(session) == homeless

    asyncio.run(replace())


def test_what_a_rank_left_behind_on_another_host_neither_hears_nor_tells_of_it(folder: Path) -> None:
    async def move() -> None:
        b, c = Member(folder, "b"), Member(folder, "c")
        there = b.open(1)
        asked, go_on = asyncio.Event(), asyncio.Event()

        async def wait(_: str) -> None:
            asked.set()
            await go_on.wait()

        cast(Any, there.server).stub.on = wait
        async with b, c, Leader(folder, {"b": b, "c": c}, known="b") as a:
            session = await a.hears_of(1)
            left_behind = session.server
            health = pb.HealthRequest()
            answer = asyncio.create_task(left_behind.execute(health, SOON_S))
            await asked.wait()
            moved = c.open(1)
            a.lead.add("c")
            await becomes(lambda: session.host == "c")
            session.source_server = left_behind
            there.log.lose("its worker has gone")
            session.log.floor_commit = 5
            go_on.set()
            await answer
            await left_behind.execute(health, SOON_S)
            assert session.log.session_state == 0
            await becomes(lambda: moved.log.floor_commit == 5)
            assert there.log.floor_commit == 0

    asyncio.run(move())
