"""What a leader leaves to its standby, and when it names one."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from led_job import becomes
from standbys import (
    HEIR,
    ID,
    LEADER,
    TOKEN,
    Away,
    Clock,
    Keeper,
    image,
    in_order,
    leader,
    named,
)

from understudy.recovery.base.control import pb
from understudy.recovery.membership.election import Leadership
from understudy.recovery.membership.job_leadership import Leading, claim, claim_as_standby
from understudy.recovery.rendezvous.store import Store
from understudy.recovery.rendezvous.worker_store import WorkerStore
from understudy.recovery.spanning.leader import standby_replication
from understudy.recovery.spanning.leader.cpu_images import Pair
from understudy.recovery.spanning.leader.member_link import MemberLink
from understudy.recovery.spanning.leader.standby_replication import NotLeft, Sources, StandbyReplication
from understudy.recovery.spanning.member.standby_state import NotKept
from understudy.recovery.state.jobs import Job
from understudy.recovery.state.span import Span


class Stub:
    """Host b as the leader asks it."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper, self.reached = keeper, True
        self.gate = asyncio.Event()
        self.gate.set()

    async def _answered(self, work: Callable[[], Any]) -> pb.KeepReply:
        await self.gate.wait()
        if not self.reached:
            return pb.KeepReply(error="it is not reached")
        try:
            found = work()
            if found is not None:
                await found
        except NotKept as problem:
            return pb.KeepReply(error=str(problem))
        return pb.KeepReply()

    def KeepStore(self, request: Any, timeout: float) -> Any:
        return self._answered(lambda: self.keeper.standby_states.keep_store(request))

    def KeepImage(self, requests: Any, timeout: float) -> Any:
        return self._answered(lambda: self.keeper.standby_states.keep_image(requests))

    def KeepJob(self, requests: Any, timeout: float) -> Any:
        return self._answered(lambda: self.keeper.standby_states.keep_job(requests))


class LeadersHost:
    """Host a, with rank 0; rank 1 is at b."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cluster = Away(Clock())
        self.keeper = Keeper(folder / "b")
        self.stub = Stub(self.keeper)
        self.store = Store()
        self.lapsed: list[str] = []
        self.amid_image = asyncio.Event()
        self.amid_image.set()
        self.known = pb.JournaledJob(name="j")

    async def begin(self) -> StandbyReplication:
        claimed = await claim(self.cluster, "c", "j", "a", 2)
        assert claimed.leadership is not None
        self.leading = Leading(self.cluster, "c", "j", claimed.record, claimed.leadership)
        self.leading.holds.set()
        self.session: Any = SimpleNamespace(rank=0, moving=None, relay="/r", active=True)
        job = Job("j", None, [])
        self.span = Span(2, TOKEN, leading=self.leading)
        lead: Any = SimpleNamespace(
            span=self.span, members={}, of=lambda member: [1],
            credentials=lambda: {"job": "j", "token": TOKEN, "leadership": self.leading.token},
        )  # fmt: skip
        sources = Sources(
            lambda job: self.store, self._image, lambda session: pb.RankDescription(rank=session.rank),
            lambda job: self.known,
        )  # fmt: skip
        self.member = MemberLink(lead, "b")
        self.member.times, self.member.stub = 1, lambda: self.stub  # type: ignore[assignment, return-value, method-assign]
        self.member.connected.set()
        lead.members["b"] = self.member
        made = StandbyReplication(job, lead, self.cluster, HEIR, sources, self.lapsed.append)
        return made

    @contextlib.asynccontextmanager
    async def _image(self, session: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(parts=self._parts(), paused_s=0.25)

    async def _parts(self) -> AsyncIterator[pb.WorkerPart]:
        for part in image(self.folder):
            yield part
            await self.amid_image.wait()

    def pair(self, serial: int) -> Pair:
        places: Any = {rank: SimpleNamespace(log_offset=100 * serial, step=serial) for rank in (0, 1)}
        return Pair(serial, frozenset((0, 1)), places, self.folder)


def test_a_leader_names_its_heir_once_that_has_everything(tmp_path: Path) -> None:
    async def check() -> None:
        host = LeadersHost(tmp_path)
        await host.store.set("early", b"1")
        leaving = await host.begin()
        host.stub.gate.clear()
        task = asyncio.ensure_future(leaving.leave(host.pair(1), [host.session]))
        await asyncio.sleep(0)
        assert await named(host.cluster) == ("", "")
        host.stub.gate.set()
        assert await task == 0.25
        name, first = await named(host.cluster)
        assert host.span.standby == name
        estate = host.keeper.standby_states.get(first)
        assert name == "b" and estate is not None and estate.serial == 1 and sorted(estate.images) == [0]
        assert host.keeper.store.holds(["early"])
        await leaving.leave(host.pair(2), [host.session])
        _, second = await named(host.cluster)
        assert second != first and host.keeper.standby_states.get(first) is not None  # until it is told again
        host.known = pb.JournaledJob(name="j", generation=5)
        await leaving.look()
        assert host.keeper.standby_states.get(first) is None
        known = host.keeper.standby_states.get(second)
        assert known is not None and known.known.generation == 5 and known.serial == 2

    asyncio.run(check())


def test_a_write_to_the_store_is_answered_once_the_heir_has_it(tmp_path: Path) -> None:
    async def check() -> None:
        host = LeadersHost(tmp_path)
        replications: list[StandbyReplication] = []
        workers = WorkerStore(tmp_path, settle=lambda: replications[0].settle())
        host.store = workers.store
        leaving = await host.begin()
        replications.append(leaving)
        await leaving.leave(host.pair(1), [host.session])
        host.stub.gate.clear()
        line = json.dumps({"do": "add", "key": "k", "amount": 3, "id": "request-1"}).encode()
        task = asyncio.ensure_future(workers.answer(line))
        await becomes(lambda: workers.store.holds(["k"]))
        assert not task.done() and not host.keeper.store.holds(["k"])
        host.stub.gate.set()
        assert json.loads(await task) == {"count": 3}
        assert host.keeper.store.done("request-1") == 3
        workers.close()

    asyncio.run(check())


def test_a_write_that_the_heir_does_not_get_is_answered_once_nobody_is_the_heir(tmp_path: Path) -> None:
    async def check() -> None:
        host = LeadersHost(tmp_path)
        leaving = await host.begin()
        await leaving.leave(host.pair(1), [host.session])
        host.stub.reached, host.cluster.there = False, False
        await host.store.set("k", b"v")
        task = asyncio.ensure_future(leaving.settle())
        await asyncio.wait({task}, timeout=0.3)
        assert not task.done()  # the cluster's store still names b
        host.cluster.there = True
        await task
        assert await named(host.cluster) == ("", "") and not leaving.host and not host.span.standby
        assert host.lapsed == ["host b: it is not reached"]
        await host.store.set("more", b"v")  # nobody is told, and nothing piles up
        assert host.store._told is None and not leaving._changes

    asyncio.run(check())


def test_what_was_decided_is_done_once_the_heir_knows_of_it(tmp_path: Path) -> None:
    async def check() -> None:
        host = LeadersHost(tmp_path)
        leaving = await host.begin()
        await leaving.settle_job()  # nobody is the standby
        host.stub.gate.clear()
        leave = asyncio.ensure_future(leaving.leave(host.pair(1), [host.session]))
        await asyncio.sleep(0)
        host.known = decided(5)  # amid it
        host.stub.gate.set()
        await leave
        await leaving.settle_job()
        _, first = await named(host.cluster)
        assert (known := host.keeper.standby_states.get(first)) is not None and known.known == decided(5)
        host.stub.gate.clear()
        host.known = decided(6)
        task = asyncio.ensure_future(leaving.settle_job())
        await asyncio.wait({task}, timeout=0.1)
        assert not task.done() and known.known == decided(5)
        host.stub.gate.set()
        await task
        assert known.known == decided(6)

    asyncio.run(check())


def decided(generation: int) -> pb.JournaledJob:
    return pb.JournaledJob(name="j", decision=pb.JournaledDecision(generation=generation))


def test_what_was_decided_waits_for_no_heir_that_is_away_once_nobody_is_named(tmp_path: Path) -> None:
    async def check() -> None:
        host = LeadersHost(tmp_path)
        leaving = await host.begin()
        await leaving.leave(host.pair(1), [host.session])
        host.stub.reached, host.cluster.there = False, False
        host.known = decided(5)
        task = asyncio.ensure_future(leaving.settle_job())
        await asyncio.wait({task}, timeout=0.3)
        assert not task.done()  # b may lead the job on
        host.cluster.there = True
        await task
        assert await named(host.cluster) == ("", "") and host.lapsed == ["host b: it is not reached"]

    asyncio.run(check())


def test_an_heir_of_which_nobody_knows_whether_it_is_named_holds_up_what_was_decided(tmp_path: Path) -> None:
    async def check() -> None:
        host = LeadersHost(tmp_path)
        leaving = await host.begin()
        host.cluster.unheard = True
        leave = asyncio.ensure_future(leaving.leave(host.pair(1), [host.session]))
        await becomes(lambda: not host.cluster.there)
        host.known = decided(5)
        task = asyncio.ensure_future(leaving.settle_job())
        await asyncio.wait({task}, timeout=0.3)
        assert not task.done() and not leave.done()
        host.cluster.there = True
        assert (await named(host.cluster))[0] == "b"
        await task
        with pytest.raises(NotLeft):
            await leave
        assert await named(host.cluster) == ("", "")

    asyncio.run(check())


def test_whoever_was_let_go_of_while_it_was_about_to_be_named_is_not_named(tmp_path: Path) -> None:
    async def check() -> None:
        host = LeadersHost(tmp_path)
        leaving = await host.begin()
        held_up, go_on = asyncio.Event(), asyncio.Event()
        keep = host.stub.KeepJob

        async def slow(requests: Any, timeout: float) -> pb.KeepReply:
            reply: pb.KeepReply = await keep(requests, timeout)
            held_up.set()
            await go_on.wait()
            return reply

        host.stub.KeepJob = slow  # type: ignore[method-assign]
        task = asyncio.ensure_future(leaving.leave(host.pair(1), [host.session]))
        await held_up.wait()
        host.stub.reached = False
        await host.store.set("k", b"v")
        await leaving.settle()  # answered: nobody is the standby any more
        host.stub.reached = True
        go_on.set()
        with pytest.raises(NotLeft, match="has not got all of the store"):
            await task
        assert (await named(host.cluster))[0] == "" and not leaving.host

    asyncio.run(check())


@pytest.mark.parametrize(
    "tell", [StandbyReplication.look, StandbyReplication.settle_job], ids=lambda one: one.__name__
)
def test_what_is_told_meanwhile_does_not_drop_what_is_being_left(
    tell: Callable[[StandbyReplication], Awaitable[None]], tmp_path: Path
) -> None:
    async def check() -> None:
        host = LeadersHost(tmp_path)
        leaving = await host.begin()
        await leaving.leave(host.pair(1), [host.session])
        host.amid_image.clear()
        task = asyncio.ensure_future(leaving.leave(host.pair(2), [host.session]))
        await becomes(lambda: len(host.keeper.files()) == 2)
        host.known = pb.JournaledJob(name="j", generation=5)
        told = asyncio.ensure_future(tell(leaving))
        await asyncio.wait({told}, timeout=0.1)
        host.amid_image.set()
        await asyncio.gather(task, told)
        name, estate = await named(host.cluster)
        known = host.keeper.standby_states.get(estate)
        assert name == "b" and known is not None and known.serial == 2

    asyncio.run(check())


def test_an_heir_that_was_started_anew_is_not_named_any_more(tmp_path: Path) -> None:
    async def check() -> None:
        host = LeadersHost(tmp_path)
        leaving = await host.begin()
        await leaving.leave(host.pair(1), [host.session])
        host.stub.keeper = Keeper(tmp_path / "b2")
        await leaving.look()
        assert leaving.host == "b"  # nothing has told us
        host.member.times += 1
        await leaving.look()
        assert await named(host.cluster) == ("", "") and "nothing that it goes with" in host.lapsed[0]

    asyncio.run(check())


def test_a_leader_that_has_claimed_the_job_again_names_its_heir_again(tmp_path: Path) -> None:
    async def check() -> None:
        host = LeadersHost(tmp_path)
        leaving = await host.begin()
        await leaving.leave(host.pair(1), [host.session])
        before = await named(host.cluster)
        await host.cluster.delete(LEADER)
        claimed = await claim(host.cluster, "c", "j", "a", 2, host.leading.record.token)
        assert claimed.leadership is not None and await named(host.cluster) == ("", "")
        host.leading.token = claimed.leadership.token
        await leaving.look()
        assert await named(host.cluster) == before

    asyncio.run(check())


def test_a_leader_that_is_none_any_more_names_nobody(tmp_path: Path) -> None:
    async def check() -> None:
        host = LeadersHost(tmp_path)
        leaving = await host.begin()
        await leaving.leave(host.pair(1), [host.session])
        entry = await host.cluster.get(HEIR)
        assert entry is not None
        await host.cluster.delete(LEADER)
        assert isinstance(
            await claim_as_standby(host.cluster, "c", "j", leader("b"), ID, entry.revision), Leadership
        )
        task = asyncio.ensure_future(leaving.leave(host.pair(2), [host.session]))
        await asyncio.wait({task}, timeout=0.5)
        assert not task.done() and await named(host.cluster) == ("", ID)
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(check())


def test_without_another_host_that_can_keep_it_a_job_is_left_to_nobody(tmp_path: Path) -> None:
    async def check() -> None:
        host = LeadersHost(tmp_path)
        leaving = await host.begin()
        host.stub.keeper = Keeper(tmp_path / "b3", images=False)
        with pytest.raises(NotLeft, match="host b: its proxyd was started without --cpu-image-every"):
            await leaving.leave(host.pair(1), [host.session])
        host.member.lost = "gone"
        with pytest.raises(NotLeft, match="no other host has ranks"):
            await leaving.leave(host.pair(1), [host.session])
        assert await named(host.cluster) == ("", "") and host.lapsed == []

    asyncio.run(check())


def test_what_goes_to_the_heir_goes_in_messages_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        monkeypatch.setattr(standby_replication, "ENOUGH_BYTES", 1000)
        host = LeadersHost(tmp_path)
        sizes = []
        keep = host.stub.KeepStore

        def keep_store(request: Any, timeout: float) -> Any:
            sizes.append(request.ByteSize())
            return keep(request, timeout)

        host.stub.KeepStore = keep_store  # type: ignore[method-assign]
        for number in range(50):
            await host.store.set(f"key-{number}", b"v" * 100)
        await host.store.set("large", b"v" * 5000)
        leaving = await host.begin()
        await leaving.leave(host.pair(1), [host.session])
        assert in_order(host.keeper.store) == in_order(host.store)
        assert len(sizes) > 5 and max(sizes) < 6000

    asyncio.run(check())
