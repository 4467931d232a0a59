"""A leader, its standbys and the cluster's store in virtual time, and what workers write to the job's store.

Requests are lost, held up and arrive after whoever asked has given up; links are cut; proxyds die and start
anew; leases end; the standby that leads the job on is lost, too, and the other one follows it.  Whoever leads
next must have every write that was answered, and know of everything that was decided and done; and nobody
else may ever answer or do something again of which it does not know.  Everything follows from a seed.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rough_link import Link
from simulation.virtual_time import run
from standby_world import Loop, Lost, Outcome, World
from standbys import stream

from understudy.protos import control_pb2 as pb
from understudy.recovery.membership.job_leadership import (
    Leading,
    NotLed,
    claim,
)
from understudy.recovery.membership.stores.store import ClusterStoreError, Unreachable
from understudy.recovery.record.job_record import JobRecord
from understudy.recovery.record.log import RecordLog
from understudy.recovery.rendezvous.store import Store
from understudy.recovery.spanning.leader.lost_hosts import Handover
from understudy.recovery.spanning.leader.member_link import MemberLink
from understudy.recovery.spanning.leader.standbys import Lapse, NotLeft, Sources, Standbys
from understudy.recovery.spanning.member.kept_images import KeptImages, NotKept
from understudy.recovery.spanning.member.succession import Succession
from understudy.recovery.spanning.ranks.image_pair import Pair
from understudy.recovery.state.jobs import Job
from understudy.recovery.state.span import Span

ROUGH_S = 200.0


class Writer:
    """What a host does that leads: it answers writes of workers, and acts by what it has decided."""

    def __init__(self, world: World, name: str, store: Store, record: JobRecord) -> None:
        self.world, self.name, self.store, self.record = world, name, store, record
        self.decided = 0
        self.gone = False
        self.given_up: list[pb.JournaledWorker] = []

    def known(self) -> pb.JournaledJob:
        span = pb.JournaledSpan(token=self.world.token, given_up=self.given_up)
        return pb.JournaledJob(name="j", generation=self.decided, span=span)

    async def decide(self) -> None:
        while not self.gone:
            await asyncio.sleep(self.world.chance.expovariate(1 / 5))
            self.decided += 1
            number = self.decided
            await self.before_it_acts()
            self.world.act(self.name, number)

    async def write(self, numbers: itertools.count[int]) -> None:
        while not self.gone:
            request = f"{self.name}-{next(numbers)}"
            if self.world.chance.random() < 0.2:
                self.store.delete(f"k{self.world.chance.randrange(3)}")
            await self.store.add("k", 1, request)
            await self.before_it_answers()
            self.world.answer(self.name, request)
            await asyncio.sleep(self.world.chance.expovariate(1))

    async def before_it_acts(self) -> None:
        await self.record.settle_known()

    async def before_it_answers(self) -> None:
        await self.record.settle()


async def all_until_cancelled(work: Sequence[Awaitable[None]]) -> None:
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Member:
    """Host b or c: a standby, if it is asked to be one."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.link = Link(world)
        self.times = 0
        self.leads = False
        self.started = 0.0
        self.lives = itertools.count()
        self.start()

    def start(self) -> None:
        """proxyd, which knows nothing."""
        self.store = self.world.store_of[self.name] = Store()
        folder = self.world.folder / f"{self.name}{next(self.lives)}"
        folder.mkdir()
        self.kept = KeptImages(Job("j", None, []), folder / "i" / self.name, lambda: self.store)
        self.newest = 0
        self.times += 1
        self.started = self.world.loop.time()

    def keep(self, request: Any, work: Callable[[], Any]) -> pb.KeepReply:
        """As MemberSide and JobLinkService do it; nothing in it waits."""
        if self.leads or request.leadership < self.newest:
            return pb.KeepReply(error="another leader has followed")
        self.newest = request.leadership
        try:
            coroutine = work()
            if coroutine is not None:
                with suppress(StopIteration):
                    coroutine.send(None)
        except NotKept as problem:
            return pb.KeepReply(error=str(problem))
        return pb.KeepReply()

    async def live(self) -> None:
        """Now and then it believes, rightly or not, that who leads is lost, and looks whose turn it is."""
        chance = self.world.chance
        while not self.leads:
            await asyncio.sleep(chance.uniform(1, 12))
            lost = {host for host in "bc" if host != self.name and chance.random() < 0.3}
            await self._look(dict.fromkeys({self.world.leader, *lost} - {self.name}, "as it seems"))

    async def _look(self, lost: dict[str, str]) -> None:
        # Who led last as far as it has heard: of those that led since nobody may have followed it.
        former = self.world.chance.choice([host for host in self.world.led if host != self.name])
        lost[former] = "as it seems"
        span = Span(3, self.world.token, former)
        job = Job("j", None, [], span=span)
        left: list[Handover] = []

        async def promote(job: Job, found: Handover) -> Any:
            self.leads = True
            left.append(found)
            self.world.goes_on(self.name, job.generation)
            return SimpleNamespace(lost_hosts=SimpleNamespace(take_over=lambda left, lost: None))

        deputy: Any = SimpleNamespace(kept_images=self.kept, followed_at=0.0)
        succession = Succession(self.name, lambda: self.link, "c", promote, lambda job: self.store)
        with suppress(Unreachable):
            await succession.why_over(job, deputy, lost)
        if left and span.leading is not None:
            await self._lead(span.leading, left[0], job.generation, lost)

    async def _lead(self, leading: Leading, handover: Handover, decided: int, lost: Collection[str]) -> None:
        log = RecordLog(self.link, "c", "j", self.world.token)
        record = JobRecord("j", log, leading, lambda: self.store, lambda: writer.known())
        record.go_on(handover.recorded.next, handover.left.images, handover.recorded.known)
        writer = Writer(self.world, self.name, self.store, record)
        writer.decided = decided
        writer.given_up = [
            pb.JournaledWorker(host=one.host, process=one.worker)
            for one in handover.left.images.workers if one.host in lost
        ] + list(handover.recorded.known.span.given_up)  # fmt: skip
        numbers = itertools.count()
        work = [leading.run(lambda host: setattr(writer, "gone", True)), writer.decide()]
        await all_until_cancelled(work + [writer.write(numbers) for _ in range(2)])


class Stub:
    """Host a's way to a member."""

    def __init__(self, way: Link, member: Member) -> None:
        self._way, self._member = way, member

    async def _asked(self, request: Any, work: Callable[[KeptImages], Any]) -> pb.KeepReply:
        member = self._member
        try:
            reply = await self._way.through(lambda: member.keep(request, lambda: work(member.kept)))
        except Unreachable:
            raise Lost() from None
        assert isinstance(reply, pb.KeepReply)
        return reply

    async def KeepImage(self, requests: Any, timeout: float) -> pb.KeepReply:
        asked = [request async for request in requests]
        return await self._asked(asked[0], lambda kept: kept.keep(stream(asked)))

    async def ReleaseImages(self, request: Any, timeout: float) -> pb.KeepReply:
        return await self._asked(request, lambda kept: kept.release(request))


class Leader:
    """Host a."""

    def __init__(self, world: World, members: dict[str, Member]) -> None:
        self.world, self.members = world, members
        self.link, self.ways = Link(world), {name: Link(world) for name in members}
        self.store = world.store_of["a"] = Store()
        self.numbers, self.pairs = itertools.count(), itertools.count(1)
        self.gone = False
        self.counting: pb.ImageSet | None = None
        """Images that lie on its disk."""
        self.decided = 0
        """As in its journal."""

    async def live(self, first: bool) -> None:
        """One proxyd, from its start until it is killed."""
        world = self.world
        if first:
            claimed = await claim(self.link, "c", "j", "a", 3)
            world.token = claimed.record.token
            leading = Leading(self.link, "c", "j", claimed.record, claimed.leadership)
        else:
            record = pb.JobLeader(version=1, host="a", hosts=3, token=world.token)
            leading = Leading(self.link, "c", "j", record)
        self.store.tell_changes(None)
        links: dict[str, MemberLink] = {}
        beside: list[asyncio.Task[None]] = []
        lead: Any = SimpleNamespace(
            here="a", span=Span(3, world.token, leading=leading), members=links, of=lambda member: [1],
            credentials=lambda: {"job": "j", "token": world.token, "leadership": leading.token},
            run_beside=lambda work: beside.append(asyncio.ensure_future(work)),
        )  # fmt: skip
        for name, member in self.members.items():
            link = links[name] = MemberLink(lead, name)
            link.times = member.times
            link.stub = partial(Stub, self.ways[name], member)  # type: ignore[assignment, method-assign]
        log = RecordLog(self.link, "c", "j", world.token)
        job_record = JobRecord("j", log, leading, lambda: self.store, lambda: writer.known())
        sessions: list[Any] = [
            SimpleNamespace(
                rank=rank, host=host, moving=None, relay="/r", active=True,
                worker=SimpleNamespace(message=lambda rank=rank: pb.Process(pid=10 + rank, start_ticks=7)),
            )
            for rank, host in enumerate(("", "b", "c"))
        ]  # fmt: skip
        job: Any = SimpleNamespace(name="j", active_sessions=lambda: sessions)
        sources = Sources(self._image, lambda session: pb.RankDescription(rank=session.rank))
        lapse = Lapse(lambda _: self._keep_none(), lambda: None, self._keep)
        standbys = Standbys(job, lead, job_record, sources, lapse)
        if not first:
            standbys.follow_predecessor(self.counting if world.chance.random() < 0.7 else None)
        writer = Writer(world, "a", self.store, job_record)
        writer.decided, writer.gone = self.decided, self.gone
        work = [
            leading.run(partial(self._give_way, writer)),
            standbys.run(),
            self._leave(standbys, sessions),
            self._see(links),
            writer.decide(),
        ]
        try:
            await all_until_cancelled(work + [writer.write(self.numbers) for _ in range(3)])
        finally:
            self.decided = writer.decided
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    def _keep_none(self) -> None:
        self.counting = None

    async def _keep(self, images: pb.ImageSet) -> None:
        self.counting = images

    def _give_way(self, writer: Writer, host: str) -> None:
        if host not in self.world.led[1:]:
            self.world.violate(f"a gave way to {host}, and {self.world.leader} leads")
        self.world.outcome.gave_way += 1
        self.gone = writer.gone = True

    async def _see(self, links: dict[str, MemberLink]) -> None:
        """Members that are reached, and those that were started anew."""
        while True:
            for name, link in links.items():
                link.times = self.members[name].times
                if self.ways[name].cut:
                    link.connected.clear()
                else:
                    link.connected.set()
            await asyncio.sleep(self.world.chance.uniform(0.1, 2))

    @asynccontextmanager
    async def _image(self, session: Any) -> Any:
        yield SimpleNamespace(parts=stream(self.world.parts[session.rank]), paused_s=0.25)

    async def _leave(self, standbys: Standbys, sessions: list[Any]) -> None:
        while True:
            await asyncio.sleep(self.world.chance.uniform(1, 12))
            places: Any = {rank: SimpleNamespace(log_offset=1, step=1) for rank in range(3)}
            number = next(self.pairs)
            folder = self.world.folder / f"pair-{number}"
            folder.mkdir()
            with suppress(NotLeft):
                pair = Pair(number, frozenset(range(3)), places, folder, images=dict(self.world.fetched))
                await standbys.leave(pair, sessions[:1])


def simulate(seed: int, folder: Path) -> Outcome:
    """One seed."""
    loop = Loop()
    world = World(seed, loop, folder)
    chance = world.chance

    async def main() -> None:
        members = {name: Member(world, name) for name in "bc"}
        leader = Leader(world, members)
        living = asyncio.ensure_future(leader.live(first=True))
        standbys = {name: asyncio.ensure_future(one.live()) for name, one in members.items()}
        ours = [leader.link, *leader.ways.values()]
        dead = False
        while loop.time() < ROUGH_S:
            await asyncio.sleep(chance.expovariate(1 / 6))
            member = chance.choice(list(members.values()))
            link = chance.choice(
                [leader.link, *leader.ways.values(), *(one.link for one in members.values())]
            )
            ours = [leader.link, *leader.ways.values()]
            match chance.choice(
                (
                    "cut",
                    "heal",
                    "isolate",
                    "join",
                    "join",
                    "die",
                    "restart member",
                    "lose who leads on",
                    "lose who leads on",
                    "nothing",
                )
            ):
                case "cut":
                    link.cut = True
                case "heal":
                    link.cut = False
                case "isolate" | "join" as what:
                    for way in ours:
                        way.cut = what == "isolate"
                case "die":
                    living.cancel()
                    await asyncio.gather(living, return_exceptions=True)
                    dead = dead or chance.random() < 0.3
                    if not dead:
                        await asyncio.sleep(chance.uniform(0, 15))
                        living = asyncio.ensure_future(leader.live(first=not world.token))
                case "restart member" if not member.leads:
                    standbys[member.name].cancel()
                    await asyncio.gather(standbys[member.name], return_exceptions=True)
                    member.start()
                    standbys[member.name] = asyncio.ensure_future(member.live())
                case "lose who leads on" if world.leader in members and members[world.leader].leads:
                    standbys[world.leader].cancel()
                    await asyncio.gather(standbys[world.leader], return_exceptions=True)
        world.rough = False
        for way in (*ours, *(one.link for one in members.values())):
            way.cut = False
        await asyncio.sleep(60)
        owner = members.get(world.leader)
        if owner is not None and not owner.leads and owner.started < world.since:
            world.violate(f"{world.leader} has claimed the job and does not lead it")
        works = living if world.leader == "a" else standbys[world.leader]
        if (owner is None or owner.leads) and not works.done() and world.answered_at < loop.time() - 40:
            world.violate(f"{world.leader} leads, and answers nothing though all is well")
        for task in (living, *standbys.values()):
            problem = task.exception() if task.done() and not task.cancelled() else None
            if problem is not None and not isinstance(problem, (ClusterStoreError, NotLed)):
                world.violate(f"it failed: {problem!r}")

    run(main(), loop)
    return world.outcome
