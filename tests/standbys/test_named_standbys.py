"""Which hosts keep images of a job's workers, and when the job's record names them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from led_job import TOKEN, becomes
from standbys import Away, Clock, Keeper, image, stream

from understudy.protos import control_pb2 as pb
from understudy.recovery.membership.job_leadership import Leading, claim
from understudy.recovery.record.job_record import JobRecord
from understudy.recovery.record.log import Recorded, RecordLog
from understudy.recovery.rendezvous.store import Store
from understudy.recovery.spanning.leader.member_link import MemberLink
from understudy.recovery.spanning.leader.standbys import Lapse, NotLeft, Sources, Standbys
from understudy.recovery.spanning.member.kept_images import NotKept
from understudy.recovery.spanning.ranks.image_file import ImageFile, Taken
from understudy.recovery.spanning.ranks.image_pair import Pair
from understudy.recovery.state.span import Span


class Host:
    """Another host of the job, as its leader asks it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.folder = name, folder
        self.keeper = Keeper(folder / name, name=name)
        self.reached, self.full = True, False
        """`full`: of each set it keeps one image, and no more."""

    async def KeepImage(self, requests: Any, timeout: float) -> pb.KeepReply:
        if not self.reached:
            raise grpc.RpcError("it is not reached")
        told = [request async for request in requests]
        if self.full and self.keeper.kept.get(told[0].set) is not None:
            return pb.KeepReply(error="its disk is full")
        try:
            await self.keeper.kept.keep(stream(told))
        except NotKept as problem:
            return pb.KeepReply(error=str(problem))
        return pb.KeepReply()

    async def ReleaseImages(self, request: Any, timeout: float) -> pb.KeepReply:
        if not self.reached:
            raise grpc.RpcError("it is not reached")
        try:
            self.keeper.kept.release(request)
        except NotKept as problem:
            return pb.KeepReply(error=str(problem))
        return pb.KeepReply()

    def ranks(self, images: pb.ImageSet) -> list[int]:
        """Whose images of that set are here."""
        known = self.keeper.kept.get(images.id)
        return sorted(known.images) if known is not None else []


class LeadersHost:
    """Host a, with rank 0; hosts b, c, … have one rank each."""

    def __init__(self, folder: Path, others: str = "b") -> None:
        self.folder = folder
        self.cluster = Away(Clock())
        self.hosts = {name: Host(folder, name) for name in others}
        self.store = Store()
        self.lapsed: list[str] = []
        self.counted: list[str] = []
        self.fewer = 0
        self.known = pb.JournaledJob(name="j")
        self.work: list[asyncio.Task[None]] = []
        self.sessions: list[Any] = [
            SimpleNamespace(
                rank=rank, host=host, moving=None, relay="/r", active=True,
                worker=SimpleNamespace(message=lambda rank=rank: pb.Process(pid=10 + rank, start_ticks=7)),
            )
            for rank, host in enumerate(["", *others])
        ]  # fmt: skip

    async def begin(self, here: str = "a") -> Standbys:
        """`here`: another host than a leads its job on."""
        claimed = await claim(self.cluster, "c", "j", "a", 2, TOKEN)
        self.leading = Leading(self.cluster, "c", "j", claimed.record, claimed.leadership)
        self.leading.holds.set()
        self.span = Span(len(self.sessions), TOKEN, leading=self.leading)
        lead: Any = SimpleNamespace(
            here=here, span=self.span, members={}, of=lambda member: [1],
            credentials=lambda: {"job": "j", "token": TOKEN, "leadership": self.leading.token},
            run_beside=lambda work: self.work.append(asyncio.ensure_future(work)),
        )  # fmt: skip
        self.members: dict[str, MemberLink] = lead.members
        for name, host in self.hosts.items():
            member = lead.members[name] = MemberLink(lead, name)
            member.times, member.stub = 1, lambda host=host: host  # type: ignore[misc, method-assign]
            member.connected.set()
        self.log = RecordLog(self.cluster, "c", "j", TOKEN)
        record = JobRecord("j", self.log, self.leading, lambda: self.store, lambda: self.known)
        job: Any = SimpleNamespace(name="j", active_sessions=lambda: list(self.sessions))
        sources = Sources(self._image, lambda session: pb.RankDescription(rank=session.rank))
        lapse = Lapse(self.lapsed.append, self._fewer, self._about_to_count)
        return Standbys(job, lead, record, sources, lapse)

    async def _about_to_count(self, images: pb.ImageSet) -> None:
        self.counted.append(images.id)

    def _fewer(self) -> None:
        self.fewer += 1

    @contextlib.asynccontextmanager
    async def _image(self, session: Any) -> AsyncIterator[Any]:
        async def parts() -> AsyncIterator[pb.WorkerPart]:
            for part in image(self.folder, session.rank):
                yield part

        yield SimpleNamespace(parts=parts(), paused_s=0.25)

    def pair(self, serial: int) -> Pair:
        """Images of the others' workers, as they have been fetched."""
        ranks = [one.rank for one in self.sessions]
        places: Any = {rank: SimpleNamespace(log_offset=100 * serial, step=serial) for rank in ranks}
        folder = self.folder / f"pair-{serial}"
        folder.mkdir()
        return Pair(serial, frozenset(ranks), places, folder, images=dict(self._taken(folder, ranks[1:])))

    def _taken(self, folder: Path, ranks: list[int]) -> Any:
        for rank in ranks:
            file = ImageFile(folder / f"rank-{rank}", "j", rank)
            for part in image(self.folder, rank):
                file.take(part)
            file.finish()
            file.close()
            taken: Taken = file.taken()
            yield rank, taken

    async def leave(self, standbys: Standbys, serial: int) -> pb.ImageSet:
        assert await standbys.leave(self.pair(serial), self.sessions[:1]) == 0.25
        await asyncio.gather(*self.work)
        return await self.named()

    async def read(self) -> Recorded:
        return await self.log.read()

    async def named(self) -> pb.ImageSet:
        images = (await self.read()).images
        return images if images is not None else pb.ImageSet()


def test_the_first_standby_keeps_all_but_its_own_and_the_second_one_what_the_first_would_take_along(
    tmp_path: Path,
) -> None:
    async def check() -> None:
        host = LeadersHost(tmp_path, "bcd")
        standbys = await host.begin()
        images = await host.leave(standbys, 1)
        assert list(images.standbys) == list(standbys.hosts) == list(host.span.standbys) == ["b", "c"]
        b, c, d = host.hosts.values()
        assert (b.ranks(images), c.ranks(images), d.ranks(images)) == ([0, 2, 3], [0, 1], [])
        held = {one.rank: (one.host, "".join(one.holders)) for one in images.workers}
        assert held == {0: ("a", "bc"), 1: ("b", "c"), 2: ("c", "b"), 3: ("d", "b")}
        # The leader keeps those of others itself: with it, each is on two hosts that are not its worker's.
        assert {place.rank: place.log_offset for place in images.cut} == dict.fromkeys(range(4), 100)
        assert sorted(path.name for path in (tmp_path / "pair-1").iterdir()) == ["rank-1", "rank-2", "rank-3"]
        again = await host.leave(standbys, 2)
        assert again.id != images.id and not b.ranks(images) and b.ranks(again) == [0, 2, 3]

    asyncio.run(check())


def test_with_two_hosts_the_other_one_is_the_standby(tmp_path: Path) -> None:
    async def check() -> None:
        host = LeadersHost(tmp_path)
        images = await host.leave(await host.begin(), 1)
        assert list(images.standbys) == ["b"] and host.hosts["b"].ranks(images) == [0]
        assert [(one.rank, list(one.holders)) for one in images.workers] == [(0, ["b"]), (1, [])]

    asyncio.run(check())


def test_images_count_once_the_record_names_them(tmp_path: Path) -> None:
    async def check() -> None:
        host = LeadersHost(tmp_path)
        standbys = await host.begin()
        await host.store.set("early", b"1")
        host.cluster.there = False
        task = asyncio.ensure_future(standbys.leave(host.pair(1), host.sessions[:1]))
        await becomes(lambda: bool(host.hosts["b"].keeper.files()))
        await asyncio.wait({task}, timeout=0.2)
        assert not task.done() and not standbys.hosts
        host.cluster.there = True
        await task
        read = await host.read()
        assert standbys.hosts == ("b",) and [change.key for change in read.changes] == ["early"]
        host.known = pb.JournaledJob(name="j", generation=5)
        await standbys.look()
        assert (await host.read()).known == host.known

    asyncio.run(check())


def test_a_host_that_cannot_keep_them_is_none_and_the_next_one_is(tmp_path: Path) -> None:
    async def check() -> None:
        host = LeadersHost(tmp_path, "bcd")
        standbys = await host.begin()
        host.hosts["b"].keeper = Keeper(tmp_path / "b2", images=False)
        images = await host.leave(standbys, 1)
        assert list(images.standbys) == ["c", "d"]
        assert host.hosts["d"].ranks(images) == [0, 2]
        host.members["c"].connected.clear()
        images = await host.leave(standbys, 2)
        assert list(images.standbys) == ["d"]

    asyncio.run(check())


def test_a_set_on_its_way_is_not_let_go_of_and_those_that_came_to_nothing_do_not_pile_up(
    tmp_path: Path,
) -> None:
    async def check() -> None:
        host = LeadersHost(tmp_path, "bc")
        standbys = await host.begin()
        await host.leave(standbys, 1)
        late = standbys._only_named(1)
        for other in host.hosts.values():
            other.full = True
        for serial in range(2, 8):
            with pytest.raises(NotLeft, match="its disk is full"):
                await standbys.leave(host.pair(serial), host.sessions[:1])
        for other in host.hosts.values():
            other.full = False
        images = await host.leave(standbys, 9)
        assert list(images.standbys) == ["b", "c"]
        with pytest.raises(NotKept):
            host.hosts["b"].keeper.kept.release(late)  # held up on its way
        assert all(one.ranks(images) for one in host.hosts.values())
        assert all(len(one.keeper.files()) == len(one.ranks(images)) for one in host.hosts.values())

    asyncio.run(check())


def test_without_another_host_that_can_keep_them_a_job_is_left_to_nobody(tmp_path: Path) -> None:
    async def check() -> None:
        host = LeadersHost(tmp_path)
        standbys = await host.begin()
        await host.leave(standbys, 1)
        host.hosts["b"].keeper = Keeper(tmp_path / "b3", images=False)
        with pytest.raises(NotLeft, match="host b: its proxyd was started without --cpu-image-every"):
            await standbys.leave(host.pair(2), host.sessions[:1])
        read = await host.read()
        assert "without --cpu-image-every" in read.over and not host.span.standbys
        assert host.lapsed == [read.over] and not standbys.record.kept
        host.members["b"].lost = "gone"
        with pytest.raises(NotLeft, match="no other host has ranks"):
            await standbys.leave(host.pair(3), host.sessions[:1])
        host.members["b"].lost = ""
        host.hosts["b"].reached = False
        with pytest.raises(NotLeft, match="host b: it is not reached"):
            await standbys.leave(host.pair(4), host.sessions[:1])
        assert len(host.lapsed) == 1

    asyncio.run(check())


def test_a_standby_that_has_lost_what_it_kept_is_none_any_more_and_the_other_one_stays(
    tmp_path: Path,
) -> None:
    async def check() -> None:
        host = LeadersHost(tmp_path, "bc")
        standbys = await host.begin()
        await host.leave(standbys, 1)
        host.members["c"].times += 1  # it was away for a moment
        await standbys.look()
        assert standbys.hosts == ("b", "c")
        host.hosts["b"].keeper = Keeper(tmp_path / "b2")  # its proxyd was started anew
        host.members["b"].times += 1
        host.hosts["b"].reached = False
        await standbys.look()
        assert standbys.hosts == ("b", "c")  # nobody knows yet
        host.hosts["b"].reached = True
        await standbys.look()
        images = await host.named()
        assert list(images.standbys) == ["c"] and host.fewer == 1 and not host.lapsed
        assert [list(one.holders) for one in images.workers] == [["c"], ["c"], []]
        host.members["c"].lost = "gone"
        await standbys.look()
        assert host.lapsed == ["host c takes no part in it any more"]
        assert (await host.read()).over == host.lapsed[0] and not standbys.hosts

    asyncio.run(check())


def test_who_leads_a_job_on_keeps_its_record_and_its_other_standby(tmp_path: Path) -> None:
    async def check() -> None:
        host = LeadersHost(tmp_path, "bcd")
        first = await host.begin()
        images = await host.leave(first, 1)
        await host.store.set("k", b"v")
        await first.record.settle()
        first.close()
        recorded = await host.read()
        assert recorded.images == images
        standbys = await host.begin("b")
        standbys.go_on(recorded, images)
        assert standbys.hosts == ("c",) and standbys.record.kept
        host.known = pb.JournaledJob(name="j", generation=9)
        await standbys.record.settle_known()  # what it decides is in the same record
        read = await host.read()
        assert (
            read.known == host.known and read.images == images and len(read.changes) == len(recorded.changes)
        )
        await standbys.look()
        assert standbys.hosts == ("c",) and host.hosts["c"].ranks(images) == [0, 1]
        host.members["c"].lost = "gone"
        await standbys.look()
        assert (await host.read()).over and not standbys.record.kept

    asyncio.run(check())
