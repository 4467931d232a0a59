"""What a leader makes of ranks of which its members have not told, not yet, or not any more."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from led_job import Leader, Member, becomes, placement_of

from understudy.recovery.agent_api.commands import NotDone
from understudy.recovery.base.control import pb
from understudy.recovery.planning.facts import RankFacts
from understudy.recovery.state.jobs import Job, Session


def test_a_rank_that_opens_while_the_leader_begins_to_follow_has_not_ended(folder: Path) -> None:
    """What its host says first was true before it opened, and may come later."""

    async def follow() -> None:
        b = Member(folder, "b")
        b.takes_part()
        async with Leader(folder, {"b": b}, known="b") as a:
            link = a.lead.members["b"]
            a.lead.opened(link, b.side.describe(b.open(1)))
            a.lead.take(link, pb.MemberNews(whole=True, present=[]))
            assert a.job.sessions[1].worker.running
            async with b:  # whoever is not there when the leader asks anew has ended
                await becomes(link.connected.is_set)
                assert a.job.sessions[1].worker.running
                b.deputies["j"].follow()
                del b.jobs["j"].sessions[1]
                await becomes(lambda: not a.job.sessions[1].worker.running)

    asyncio.run(follow())


@pytest.mark.parametrize("leaving", [False, True])
def test_a_rank_that_stayed_though_it_was_to_move_ends_at_once(folder: Path, leaving: bool) -> None:
    """Its leader was started anew amid the move, of which nothing came; the rank may yet go if it leaves."""

    async def follow() -> None:
        b = Member(folder, "b")
        moving = b.open(1).moving = asyncio.Event() if leaving else None
        async with b, Leader(folder, {"b": b}, known="b", awaited="b") as a:
            a.span.remote_ranks, a.span.astray = {1}, {1}
            session = await a.hears_of(1)
            await becomes(lambda: not a.span.awaited)
            a.lead._not_there(session)
            assert session.worker.running == (moving is not None)

    asyncio.run(follow())


@pytest.mark.parametrize("clean", [True, False])
def test_a_rank_that_ended_before_its_hosts_proxyd_died_has_left(folder: Path, clean: bool) -> None:
    """Of whoever leads anew nobody else would hear that, and its peers would wait for it."""

    async def follow() -> None:
        b = Member(folder, "b")
        b.open(1, world=3)
        b.jobs["j"].departed[2], b.jobs["j"].last_facts[2] = clean, RankFacts(2, 5, alive=False, commits=())
        async with b, Leader(folder, {"b": b}, known="b", awaited="b") as a:
            a.span.remote_ranks = {1, 2}
            await a.hears_of(1)
            await becomes(lambda: not a.span.awaited)
            assert a.job.departed == {2: clean} and a.job.last_facts[2].generation == 5
            assert a.job.sessions.keys() == {1}

    asyncio.run(follow())


def test_of_a_rank_that_runs_elsewhere_its_former_hosts_word_does_not_count(folder: Path) -> None:
    async def follow() -> None:
        b, c = Member(folder, "b"), Member(folder, "c")
        b.takes_part().moved_out(c.open(1), None)
        b.jobs["j"].departed[1] = True
        async with c, Leader(folder, {"b": b, "c": c}, known="bc", awaited="bc") as a:
            a.span.remote_ranks = {1}
            await a.hears_of(1)
            async with b:
                await becomes(lambda: not a.span.awaited)
            assert not a.job.departed and a.job.sessions[1].worker.running

    asyncio.run(follow())


def test_a_move_whose_round_is_broken_off_comes_to_its_end_and_the_next_round_waits(folder: Path) -> None:
    arrives = asyncio.Event()

    async def send(job: Job, session: Session, destination: str, *_: object) -> pb.Transfer:
        await arrives.wait()
        there = c.open(session.rank)
        c.takes_part().arrived(there)
        b.takes_part().moved_out(session, None)
        del b.jobs["j"].sessions[session.rank]
        return pb.Transfer(source="b", destination=destination)

    async def move() -> None:
        b.workers.send_for_leader = send
        b.open(1)
        async with b, c, Leader(folder, {"b": b, "c": c}, known="bc") as a:
            session, placement = await a.hears_of(1), placement_of(a)
            await becomes(a.lead.members["b"].connected.is_set)
            broken_off = asyncio.create_task(a.lead.relocations.move(session, "c", keep_source=False))
            await becomes(lambda: session.moving is not None)
            broken_off.cancel()
            await asyncio.wait({broken_off})
            assert placement.awaited([session]) == "rank 1 is on its way from one host to another"
            with pytest.raises(NotDone, match="being moved already"):
                await a.lead.relocations.move(session, "c", keep_source=False)
            ready = asyncio.create_task(placement.ready([session], suspicious=False))
            arrives.set()
            await asyncio.wait_for(ready, 10)
            assert session.host == "c" and session.worker.running and session.moving is None

    b, c = Member(folder, "b"), Member(folder, "c")
    asyncio.run(move())


@pytest.mark.parametrize("where", ["on the leader's host", "on another one"])
@pytest.mark.parametrize("keep_source", [False, True])
def test_a_rank_that_has_come_goes_on_though_its_former_host_does_not_tell(
    folder: Path, where: str, keep_source: bool
) -> None:
    """As where the link to that host breaks meanwhile: it was taken to run there, and then to have ended."""

    async def send(job: Job, session: Session, destination: str, *_: object) -> pb.Transfer:
        if destination == "a":
            leaders[0].agent.awaited[1].set_result((folder, os.getpid(), "relay"))
        else:
            c.takes_part().arrived(c.open(1))
            await becomes(lambda: not leaders[0].lead.relocations.awaited_at(1))
        raise RuntimeError("its answer is lost")

    async def move() -> None:
        b.workers.send_for_leader = send
        b.open(1)
        c.takes_part()
        async with b, c, Leader(folder, {"b": b, "c": c}, known="bc") as a:
            leaders.append(a)
            session = await a.hears_of(1)
            await becomes(a.lead.members["c"].connected.is_set)
            former, worker = session.server, session.worker
            destination = "a" if where == "on the leader's host" else "c"
            with pytest.raises(NotDone):
                await a.lead.relocations.move(session, destination, keep_source)
            assert session.host == ("c" if destination == "c" else "") and session.worker.running
            assert not worker.running and a.agent.followed == [session] and not a.span.astray
            assert session.source_server is (former if keep_source else None)
            assert not session.server.retired and not session.server.process.running

    leaders: list[Leader] = []
    b, c = Member(folder, "b"), Member(folder, "c")
    asyncio.run(move())


def test_ranks_that_ran_elsewhere_and_of_which_no_host_tells_have_ended(folder: Path) -> None:
    """A host that has closed the job since tells nothing; one on its way is waited for a while."""

    async def follow() -> None:
        b = Member(folder, "b")
        b.open(1, world=4)
        async with Leader(folder, {"b": b}, known="b", awaited="b") as a:
            a.span.remote_ranks = {1, 2}
            async with b:
                session = await a.hears_of(1)
                await becomes(lambda: not a.span.awaited)
                assert a.job.departed == {2: False} and not a.span.remote_ranks
                a.span.remote_ranks, a.span.astray = {1, 3}, {3}
                a.lead.attendance.look_for_untold(patience_s=0.3)
                text = "rank 3, which was on its way to another host, is not found yet"
                assert placement_of(a).awaited([session]) == text
                await asyncio.wait_for(placement_of(a).ready([session], suspicious=False), 10)
                assert a.job.departed == {2: False, 3: False}

    asyncio.run(follow())
