"""A job's leading host is lost: its standby leads the job on, and the other members follow it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from led_job import TOKEN, Leader, Member, becomes
from standbys import HEIR, ID, LEADER, NUMBERS, Away, Clock, Keeper, first_store, leader, standby, stream

from understudy.recovery.agent.remote_ranks import RemoteRanks
from understudy.recovery.base.control import pb
from understudy.recovery.base.timing import Timing
from understudy.recovery.history.report import account_of_adoption, adoption_entry
from understudy.recovery.job.coordinator import Coordinator
from understudy.recovery.membership.job_leadership import claim_as_standby
from understudy.recovery.membership.records import read
from understudy.recovery.spanning.member.member import NotAdmitted
from understudy.recovery.spanning.member.standby_state import StandbyState
from understudy.recovery.spanning.member.succession import Succession, take_over
from understudy.recovery.state.jobs import Job, Session
from understudy.recovery.state.span import Span


class Lost:
    """Host b or c of a job whose leader a is lost."""

    def __init__(self, folder: Path, here: str) -> None:
        self.cluster = Away(Clock())
        self.keeper = Keeper(folder / here)
        self.deputy: Any = SimpleNamespace(standby_states=self.keeper.standby_states, followed_at=0.0)
        self.job = Job("j", None, [], span=Span(2, TOKEN, "a"))
        self.promoted: list[str] = []
        self.succession = Succession(here, lambda: self.cluster, "c", self._promote)

    async def _promote(self, job: Job) -> Any:
        assert job.span is not None and job.span.leading is not None and not job.span.leader
        self.promoted.append(job.name)
        return SimpleNamespace(
            images=None, run_beside=lambda work: work.close(), span=job.span, job=job,
            lost_hosts=SimpleNamespace(expect_loss=lambda former: former),
        )  # fmt: skip

    async def why_over(self, *lost: str) -> str:
        return await self.succession.why_over(self.job, self.deputy, {"a", *lost}, "its lease has ended")


def test_the_heir_leads_the_job_on_as_the_leader_left_it(tmp_path: Path) -> None:
    async def check() -> None:
        lost = Lost(tmp_path, "b")
        lost.keeper.standby_states.keep_store(first_store("k"))
        recovery = pb.Recovery(fault="server-died")
        known = pb.JournaledJob(
            name="j", generation=4, decision=pb.JournaledDecision(generation=4),
            corruption=pb.JournaledCorruption(rank=1, trusted={1: 7}), recoveries=[recovery],
            departures=[pb.JournaledDeparture(rank=3)],
            span=pb.JournaledSpan(hosts=2, token=TOKEN, members=["b", "c"], awaited=["b", "c"]),
        )  # fmt: skip
        first = pb.KeepJobRequest(estate=ID, serial=3, known=known, number=next(NUMBERS))
        await lost.keeper.standby_states.keep_job(stream([first]))
        await lost.cluster.put(HEIR, standby("b"))
        assert await lost.why_over() == "" and lost.promoted == ["j"]
        span = lost.job.span
        assert span is not None and span.members == {"c"} and span.awaited == {"c"}
        assert lost.job.generation == 4 and list(lost.job.recoveries) == [recovery]
        assert lost.job.departed == {3: False}
        [adoption] = lost.job.adoptions
        assert (adoption.former_host, adoption.host, adoption.recovery_redone) == ("a", "b", True)
        assert lost.job.corruption is not None and lost.job.corruption.trusted == {1: 7}
        assert account_of_adoption(adoption).startswith("host a, which led the job, was lost, and host b led")
        assert account_of_adoption(adoption).endswith("a recovery was under way and was done again")
        entry = adoption_entry(adoption)
        assert (entry["former_host"], entry["host"]) == ("a", "b")
        record = await lost.cluster.get(LEADER)
        assert record is not None and read(record.value, pb.JobLeader).host == "b"

    asyncio.run(check())


def test_the_repair_of_a_corruption_goes_on_once_all_ranks_are_known_and_before_any_other_plan() -> None:
    """Nobody but the former leader knew which commits are right."""

    class Repairing(Coordinator):
        def __init__(self) -> None:
            self.found: list[tuple[Session, str, Mapping[int, int]]] = []

        def corruption_found(self, session: Session, message: str, trusted: Mapping[int, int]) -> bool:
            self.found.append((session, message, trusted))
            return True

    async def check() -> None:
        job, coordinator = Job("j", None, [], span=Span(2, TOKEN, awaited={"c"})), Repairing()
        job.corruption = pb.JournaledCorruption(rank=1, message="rank 1 differs", trusted={0: 6, 1: 7})
        agent: Any = SimpleNamespace(coordinators={"j": coordinator})
        task = asyncio.ensure_future(RemoteRanks(agent).go_on_repairing(job))
        await asyncio.sleep(0)
        assert job.opening.locked() and not coordinator.found
        session: Any = SimpleNamespace(rank=1)
        job.sessions[1] = session  # host c has told of it
        assert job.span is not None
        job.span.awaited.clear()
        await task
        assert coordinator.found == [(session, "rank 1 differs", {0: 6, 1: 7})]
        assert job.corruption is None and not job.opening.locked()

    asyncio.run(check())


def test_an_heir_whose_claim_was_made_unheard_leads_all_the_same(tmp_path: Path) -> None:
    async def check() -> None:
        lost = Lost(tmp_path, "b")
        lost.keeper.standby_states.keep_store(first_store())
        await lost.keeper.standby_states.keep_job(stream([pb.KeepJobRequest(estate=ID, serial=3, number=1)]))
        revision = await lost.cluster.put(HEIR, standby("b"))
        assert await claim_as_standby(lost.cluster, "c", "j", leader("b"), ID, revision)
        assert await lost.why_over() == "" and lost.promoted == ["j"]

    asyncio.run(check())


def test_an_heir_without_its_estate_says_so_and_nobody_waits_for_it(tmp_path: Path) -> None:
    async def check() -> None:
        lost, other = Lost(tmp_path, "b"), Lost(tmp_path, "c")
        other.cluster = lost.cluster
        await lost.cluster.put(HEIR, standby("b"))
        assert await other.why_over() == ""
        assert await lost.why_over() == "what it has left to this host is gone" and not lost.promoted
        assert await other.why_over() == "it has left the job to nobody"

    asyncio.run(check())


def test_other_members_wait_for_the_heir_unless_it_is_lost_too_or_takes_too_long(tmp_path: Path) -> None:
    async def check() -> None:
        lost = Lost(tmp_path, "c")
        assert await lost.why_over() == "it has left the job to nobody"
        await lost.cluster.put(HEIR, standby("b"))
        assert await lost.why_over() == ""
        assert "host b, which was to lead it on, is lost, too" in await lost.why_over("b")
        await lost.cluster.put(HEIR, standby("", leads="b"))
        assert await lost.why_over() == ""  # it leads, and will follow us
        impatient = Timing(follows_s=-1.0)
        lost.succession = Succession("c", lambda: lost.cluster, "c", lost._promote, impatient)
        assert "was to lead it on, and does not" in await lost.why_over()
        await lost.cluster.put(HEIR, b"nonsense")
        assert "cannot be read" in await lost.why_over()
        lost.cluster.there = False
        assert await lost.why_over() == ""  # nobody can tell

    asyncio.run(check())


def test_a_job_of_that_name_that_others_have_started_since_is_not_waited_for(tmp_path: Path) -> None:
    async def check() -> None:
        lost = Lost(tmp_path, "c")
        await lost.cluster.put(HEIR, standby("b", token=b"u" * 32))
        assert await lost.why_over() == "it has left the job to nobody"

    asyncio.run(check())


# ------------------------------------------------------------------ and its members
def test_a_member_is_led_by_whoever_follows_it_in_the_newest_way(folder: Path) -> None:
    async def follow(b: Member, leadership: int, leader: str) -> None:
        request = pb.FollowRanksRequest(job="j", token=TOKEN, leadership=leadership)
        news = b.side.follow(request, leader)
        assert (await anext(news)).whole
        await news.aclose()  # type: ignore[attr-defined]

    async def check() -> None:
        b = Member(folder, "b")
        session = b.open(1)
        span = session.job.span
        assert span is not None and span.leader == "a"
        await follow(b, 5, "a")
        await follow(b, 7, "c")
        assert span.leader == "c"
        with pytest.raises(NotAdmitted, match="another leader has followed"):
            await follow(b, 5, "a")
        assert span.leader == "c"

    asyncio.run(check())


def test_a_former_leader_that_lets_go_of_its_members_does_no_rank_any_harm(folder: Path) -> None:
    async def check() -> None:
        b = Member(folder, "b")
        there = b.open(1)
        async with b, Leader(folder, {"b": b}, known="b") as a:
            session = await a.hears_of(1)
            await becomes(a.lead.members["b"].connected.is_set)
            a.lead.let_go_of_members("host c leads")
            a.lead.worker_ended(session)
            session.fail("ended")  # as whatever happens to it here would write it
            await a.lead.ended(session)
            await asyncio.sleep(0.1)
            assert there.log.session_state == 0 and there.active

    asyncio.run(check())


def test_ranks_of_a_former_leader_are_given_up_once_all_others_have_told_of_theirs(folder: Path) -> None:
    """Rank 0 ran at x, which led; rank 1 is at b; rank 2 had gone from x to b meanwhile."""

    async def check() -> None:
        b, x = Member(folder, "b"), Member(folder, "x")
        told = []
        for rank in (0, 2):
            session = x.open(rank, world=3)
            told.append(x.side.describe(session))
        b.open(1, world=3)
        estate = StandbyState(folder, serial=4, ranks=told)
        async with Leader(folder, {"b": b, "x": x}, known="b", awaited="b") as a:
            take_over(a.lead, estate, "x", "its lease has ended")
            lost = a.job.sessions[0]
            assert (lost.host, lost.restores_from_image) == ("x", 4)
            a.lead.lost_hosts.give_up("x", "as seen by all")
            assert lost.state == "running"  # b has not told yet
            b.open(2, world=3)
            async with b:
                await becomes(lambda: lost.state == "lost")
            moved = a.job.sessions[2]
            assert (moved.host, moved.restores_from_image) == ("b", 0)
            assert "host x is lost, and with it the worker of rank 0" in lost.note

    asyncio.run(check())


def test_a_rank_that_nobody_knows_of_after_the_leader_was_lost_ends_the_job(folder: Path) -> None:
    async def check() -> None:
        b = Member(folder, "b")
        b.open(1)
        async with b, Leader(folder, {"b": b}, known="b", awaited="b") as a:
            take_over(a.lead, StandbyState(folder, serial=4), "x", "its lease has ended")
            session = await a.hears_of(1)
            await becomes(lambda: session.state == "lost")
            assert "the worker of rank 0" in session.note and "after the newest CPU images" in session.note

    asyncio.run(check())
