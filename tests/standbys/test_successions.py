"""A job's leading host is lost: one of its standbys leads the job on, and the other members follow it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from google.protobuf.message import DecodeError
from led_job import TOKEN, Leader, Member, becomes
from standbys import ID, LEADER, OWNER, Away, Clock, Keeper, claim_now, image, image_set, owner, record

from understudy.protos import control_pb2 as pb
from understudy.recovery.agent.remote_ranks import RemoteRanks
from understudy.recovery.base.timing import Timing
from understudy.recovery.history.report import account_of_adoption, adoption_entry
from understudy.recovery.job.coordinator import Coordinator
from understudy.recovery.membership.records import BadRecord, read
from understudy.recovery.record.log import Recorded
from understudy.recovery.rendezvous import store as rendezvous_store
from understudy.recovery.rendezvous.store import Store
from understudy.recovery.spanning.leader.lost_hosts import Handover
from understudy.recovery.spanning.member.member import NotAdmitted
from understudy.recovery.spanning.member.succession import NOBODY, Succession, known_of
from understudy.recovery.spanning.ranks.image_set import KeptSet, Left
from understudy.recovery.state.jobs import Job, Session
from understudy.recovery.state.span import Span


class Lost:
    """Host b or c of a job whose leader a is lost."""

    def __init__(self, folder: Path, here: str, cluster: Away | None = None) -> None:
        self.folder = folder
        self.cluster = cluster or Away(Clock())
        self.keeper = Keeper(folder / here, name=here)
        self.deputy: Any = SimpleNamespace(kept_images=self.keeper.kept, followed_at=0.0)
        self.job = Job("j", None, [], span=Span(2, TOKEN, "a"))
        self.left: list[tuple[Handover, dict[str, str]]] = []
        self.worker_store: Store | None = self.keeper.store
        self.succession = self._succession(here, Timing(record_again_s=0.0))

    def _succession(self, here: str, timing: Timing) -> Succession:
        return Succession(
            here, lambda: self.cluster, "c", self._promote, lambda job: self.worker_store, timing
        )

    def impatient(self, here: str) -> None:
        self.succession = self._succession(here, Timing(follows_s=-1.0, record_again_s=0.0))

    async def _promote(self, job: Job, left: Handover) -> Any:
        assert job.span is not None and job.span.leading is not None and not job.span.leader
        return SimpleNamespace(
            lost_hosts=SimpleNamespace(take_over=lambda left, lost: self.left.append((left, lost)))
        )

    async def keep(self, *ranks: int) -> None:
        for rank in ranks:
            await self.keeper.keep(image(self.folder, rank), rank=rank)

    async def why_over(self, *lost: str) -> str:
        return await self.succession.why_over(
            self.job, self.deputy, dict.fromkeys(("a", *lost), "its lease has ended")
        )


def two_copies(standbys: str = "bc") -> pb.ImageSet:
    """Rank 0 at a, which leads, 1 at b, 2 at c, 3 at d: as their leader has them kept."""
    return image_set({0: ("a", "bc"), 1: ("b", "c"), 2: ("c", "b"), 3: ("d", "b")}, standbys)


def test_a_standby_leads_the_job_on_as_the_leader_left_it(tmp_path: Path) -> None:
    async def check() -> None:
        lost = Lost(tmp_path, "b")
        await lost.keep(0)
        recovery = pb.Recovery(fault="server-died")
        known = pb.JournaledJob(
            name="j", generation=4, decision=pb.JournaledDecision(generation=4),
            corruption=pb.JournaledCorruption(rank=1, trusted={1: 7}), recoveries=[recovery],
            departures=[pb.JournaledDeparture(rank=3)],
            span=pb.JournaledSpan(hosts=2, token=TOKEN, members=["b", "c"], awaited=["b", "c"]),
        )  # fmt: skip
        await lost.keeper.store.set("of a former record", b"1")
        await lost.cluster.put(OWNER, owner("a"))
        changes = [pb.StoredKey(key="k", value=b"v", request="request-1", count=3)]
        await record(
            lost.cluster,
            pb.JobRecordBatch(changes=changes, known=known),
            pb.JobRecordBatch(images=two_copies()),
        )
        assert await lost.why_over() == ""
        [(handover, why)] = lost.left
        assert (handover.former, handover.left.images, why) == (
            "a",
            two_copies(),
            {"a": "its lease has ended"},
        )
        assert handover.left.kept.folder.name == ID and handover.recorded.next == 3
        assert lost.keeper.kept.get(ID) is None
        assert lost.keeper.store.holds(["k"]) and len(lost.keeper.store) == 1
        assert lost.keeper.store.done("request-1") == 3
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
        found = await lost.cluster.get(LEADER)
        assert found is not None and read(found.value, pb.JobLeader).host == "b"

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


async def of_lost_leader(folder: Path, here: str, images: pb.ImageSet, *kept: int) -> Lost:
    """Whose record names these images, of which some are here."""
    lost = Lost(folder, here)
    await lost.keep(*kept)
    await lost.cluster.put(OWNER, owner("a"))
    await record(lost.cluster, pb.JobRecordBatch(images=images))
    return lost


def test_a_standby_whose_claim_was_made_unheard_leads_all_the_same(tmp_path: Path) -> None:
    async def check() -> None:
        lost = await of_lost_leader(tmp_path, "b", two_copies(), 0)
        assert await claim_now(lost.cluster, "b")
        assert await lost.why_over() == "" and len(lost.left) == 1

    asyncio.run(check())


@pytest.mark.parametrize(
    ("here", "kept", "also_lost", "leads"),
    [
        ("b", (0, 2, 3), "", True),
        ("b", (0, 2, 3), "d", True),
        ("b", (0, 2, 3), "c", True),  # the second standby
        ("c", (0, 1), "b", True),  # the first one
        ("c", (0, 1), "", False),  # it is b's turn
        ("c", (0, 1), "d", False),  # it has no image of rank 3
        ("d", (), "", False),
    ],
)
def test_of_two_standbys_the_first_leads_that_has_images_of_all_workers_that_were_lost(
    here: str, kept: tuple[int, ...], also_lost: str, leads: bool, tmp_path: Path
) -> None:
    async def check() -> None:
        lost = await of_lost_leader(tmp_path, here, two_copies(), *kept)
        assert await lost.why_over(*also_lost) == "" and bool(lost.left) == leads
        if leads:
            assert lost.left[0][1].keys() == {"a", *also_lost}

    asyncio.run(check())


def test_a_standby_follows_one_that_was_lost_before_anybody_heard_that_it_led(tmp_path: Path) -> None:
    async def check() -> None:
        lost = await of_lost_leader(tmp_path, "c", two_copies(), 0, 1)
        await lost.cluster.put(OWNER, owner("b"))
        assert await lost.why_over() == "" and not lost.left  # b will follow us
        assert await lost.why_over("b") == ""
        [(handover, why)] = lost.left
        assert handover.former == "b" and why.keys() == {"a", "b"}
        [adoption] = lost.job.adoptions
        assert (adoption.former_host, adoption.host) == ("b", "c")

    asyncio.run(check())


def test_a_standby_that_was_given_up_meanwhile_does_not_lead_though_it_is_back(tmp_path: Path) -> None:
    """Its workers' ranks run elsewhere."""

    async def check() -> None:
        lost = await of_lost_leader(tmp_path, "b", two_copies(), 0)
        worker = pb.JournaledWorker(host="b", process=pb.Process(pid=11, start_ticks=7))
        known = pb.JournaledJob(name="j", span=pb.JournaledSpan(given_up=[worker]))
        await record(lost.cluster, pb.JobRecordBatch(images=two_copies(), known=known))
        assert await lost.why_over() == "" and not lost.left  # c leads
        assert await lost.why_over("c") == "this host was given up, and its ranks go on elsewhere"
        other = Lost(tmp_path, "c", lost.cluster)
        await other.keep(0, 1)
        assert await other.why_over() == "" and other.left  # at once

    asyncio.run(check())


def test_the_second_standby_leads_if_the_first_one_does_not_for_too_long(tmp_path: Path) -> None:
    async def check() -> None:
        lost = await of_lost_leader(tmp_path, "c", two_copies(), 0, 1)
        assert await lost.why_over() == "" and not lost.left
        lost.impatient("c")
        assert await lost.why_over() == "" and lost.left

    asyncio.run(check())


def test_a_standby_without_its_images_waits_for_the_other_one_if_there_is_one(tmp_path: Path) -> None:
    async def check() -> None:
        lost = await of_lost_leader(tmp_path, "b", two_copies())
        assert await lost.why_over() == "" and not lost.left
        gone = "the CPU images that were kept on this host are gone"
        assert await lost.why_over("c") == gone
        await record(lost.cluster, pb.JobRecordBatch(images=two_copies("b")))
        assert await lost.why_over() == gone and not lost.left

    asyncio.run(check())


@pytest.mark.parametrize(
    ("also_lost", "sentence"),
    [
        ("bc", "hosts b and c, which were to lead it on, are lost, too"),
        ("bd", "no host that is left has CPU images of all workers that were lost"),
    ],
)
def test_a_job_of_which_too_much_is_lost_at_once_ends_with_the_reason(
    also_lost: str, sentence: str, tmp_path: Path
) -> None:
    async def check() -> None:
        lost = await of_lost_leader(tmp_path, "e", two_copies())
        assert await lost.why_over(*also_lost) == sentence

    asyncio.run(check())


def test_other_members_wait_for_a_standby_unless_it_takes_too_long(tmp_path: Path) -> None:
    async def check() -> None:
        lost = Lost(tmp_path, "d")
        assert await lost.why_over() == NOBODY
        await lost.cluster.put(OWNER, owner("a"))
        assert await lost.why_over() == NOBODY
        await record(lost.cluster, pb.JobRecordBatch(over="no host keeps images"))
        assert await lost.why_over() == f"{NOBODY}: no host keeps images"
        await record(lost.cluster, pb.JobRecordBatch(images=two_copies("b")))
        assert await lost.why_over() == ""
        assert await lost.why_over("b") == "host b, which was to lead it on, is lost, too"
        lost.impatient("d")
        assert "host b was to lead it on, and does not within" in await lost.why_over()
        await lost.cluster.put(OWNER, owner("b"))
        assert "host b was to lead it on, and does not within" in await lost.why_over()
        lost.succession = lost._succession("d", Timing(record_again_s=0.0))
        assert await lost.why_over() == ""  # it leads, and will follow us
        await lost.cluster.put(OWNER, b"nonsense")
        assert "cannot be read" in await lost.why_over()
        lost.cluster.there = False
        assert await lost.why_over() == ""  # nobody can tell

    asyncio.run(check())


def test_a_record_whose_store_has_no_room_here_is_not_led_on_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        monkeypatch.setattr(rendezvous_store, "LARGEST_STORE", 1 << 20)
        lost = await of_lost_leader(tmp_path, "b", two_copies(), 0)
        large = [pb.StoredKey(key=f"k{number}", value=b"v" * 300_000) for number in range(4)]
        await record(lost.cluster, pb.JobRecordBatch(images=two_copies(), changes=large))
        assert "cannot be read: the store holds 1 MiB at most" in await lost.why_over()
        assert not lost.left and await lost.cluster.get(LEADER) is None

    asyncio.run(check())


def test_a_member_that_is_no_standby_reads_the_record_once_in_a_while(tmp_path: Path) -> None:
    async def check() -> None:
        lost = await of_lost_leader(tmp_path, "d", two_copies())
        lost.succession = lost._succession("d", Timing())
        assert await lost.why_over() == ""
        await record(lost.cluster, pb.JobRecordBatch(over="it has ended"))
        assert await lost.why_over() == ""
        lost.succession.forget("j")
        assert await lost.why_over() == f"{NOBODY}: it has ended"

    asyncio.run(check())


def test_a_job_of_that_name_that_others_have_started_since_is_not_waited_for(tmp_path: Path) -> None:
    async def check() -> None:
        lost = await of_lost_leader(tmp_path, "c", two_copies(), 0)
        await lost.cluster.put(OWNER, owner("b", token=b"u" * 32))
        assert await lost.why_over() == NOBODY

    asyncio.run(check())


def test_of_a_record_that_anybody_may_have_written_nothing_comes_but_a_job_or_a_sentence() -> None:
    chance = random.Random(5)
    given_up = pb.JournaledWorker(host="b", process=pb.Process(pid=9))
    known = pb.JournaledJob(
        name="j", generation=4, launcher=pb.Process(pid=1),
        drills=[pb.JournaledDrill(drill=pb.Drill(kind="kill-server", rank=1, step=2), slot=1)],
        departures=[pb.JournaledDeparture(rank=3, newest=pb.JournaledCommit(communicators=[1, 2, 3]))],
        ends=[pb.JournaledEnd(clean=True, status=pb.RankStatus(rank=1))],
        recoveries=[pb.Recovery(fault="server-died")],
        span=pb.JournaledSpan(hosts=2, token=TOKEN, members=["b"], given_up=[given_up]),
    )  # fmt: skip
    whole = pb.JobRecordBatch(version=1, first=True, known=known, images=two_copies()).SerializeToString()
    job, outcomes = Job("j", None, []), {"a job": 0, "a sentence": 0}
    assert known_of(job, known).launcher is None
    for _ in range(3000):
        raw = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            place = chance.randrange(len(raw))
            raw[place : place + chance.randrange(2)] = chance.randbytes(chance.randrange(3))
        try:
            recorded = Recorded()
            recorded.add(pb.JobRecordBatch.FromString(bytes(raw)))
            known_of(job, recorded.known)
            outcomes["a job"] += 1
        except (DecodeError, BadRecord):
            outcomes["a sentence"] += 1
    print(outcomes)
    assert min(outcomes.values()) > 100


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


def left_behind(folder: Path, *told: tuple[str, pb.RankDescription]) -> Handover:
    """By x, which led; of each rank its host, and what it told of it when the images were taken."""
    described = {one.rank: one for _, one in told}
    images = image_set({one.rank: (host, "a") for host, one in told})
    images.serial = 4
    return Handover("x", Recorded(), Left(images, KeptSet(folder, (1, 1), described=described)))


def test_ranks_of_a_former_leader_are_given_up_once_all_others_have_told_of_theirs(folder: Path) -> None:
    """Rank 0 ran at x, which led; rank 1 is at b; rank 2 had gone from x to b meanwhile."""

    async def check() -> None:
        b, x = Member(folder, "b"), Member(folder, "x")
        told = []
        for rank in (0, 2):
            session = x.open(rank, world=3)
            told.append(("x", x.side.describe(session)))
        b.open(1, world=3)
        async with Leader(folder, {"b": b, "x": x}, known="b", awaited="b") as a:
            a.lead.lost_hosts.take_over(left_behind(folder, *told), {"x": "its lease has ended"})
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


@pytest.mark.parametrize("when", ["at once", "before it has told of its rank"])
def test_ranks_of_two_hosts_that_are_lost_come_back_once_all_others_have_told_of_theirs(
    when: str, folder: Path
) -> None:
    """Rank 0 ran at x, which led, and rank 2 at y; rank 1 is at b."""

    class Images:
        """That are all there."""

        def __init__(self) -> None:
            self.brought: list[int] = []

        def bring_back(self, lost: list[Session]) -> str:
            self.brought += [session.rank for session in lost]
            for session in lost:
                session.restores_from_image = 4
            return ""

        def take_over(self, left: Left) -> Left:
            return left

        def came_back(self, session: Session) -> None: ...

        def hold(self) -> None: ...

        def close(self) -> None: ...

    async def check() -> None:
        b, x, y = Member(folder, "b"), Member(folder, "x"), Member(folder, "y")
        told = [
            ("x", x.side.describe(x.open(0, world=3))),
            ("y", y.side.describe(y.open(2, world=3))),
            ("b", b.side.describe(b.open(1, world=3))),
        ]
        async with Leader(folder, {"b": b, "x": x, "y": y}, known="by", awaited="by") as a:
            images = Images()
            a.lead.images, a.lead.room_for = cast(Any, images), lambda _: True
            lost = {"x": "its lease has ended"} | ({"y": "likewise"} if when == "at once" else {})
            a.lead.lost_hosts.take_over(left_behind(folder, *told), lost)
            if when != "at once":
                assert 2 not in a.job.sessions
                a.lead.lost_hosts.give_up("y", "likewise")
            assert {0, 2} <= a.job.sessions.keys() and not images.brought
            async with b:
                await becomes(lambda: images.brought == [0, 2])
                assert [a.job.sessions[rank].state for rank in range(3)] == ["running"] * 3
                assert [a.job.sessions[rank].restores_from_image for rank in range(3)] == [4, 0, 4]
                assert [a.job.sessions[rank].server.process.running for rank in (0, 2)] == [False, False]

    asyncio.run(check())


def test_a_rank_that_nobody_knows_of_after_the_leader_was_lost_ends_the_job(folder: Path) -> None:
    async def check() -> None:
        b = Member(folder, "b")
        b.open(1)
        async with b, Leader(folder, {"b": b}, known="b", awaited="b") as a:
            a.lead.lost_hosts.take_over(left_behind(folder), {"x": "its lease has ended"})
            session = await a.hears_of(1)
            await becomes(lambda: session.state == "lost")
            assert "the worker of rank 0" in session.note and "after the newest CPU images" in session.note

    asyncio.run(check())
