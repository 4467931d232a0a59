"""A leader, its standbys and the cluster's store in virtual time, and what workers write to the job's store.

Requests are lost, held up and arrive after whoever asked has given up; links are cut; proxyds die and start
anew; leases end.  Whoever leads a job on must have every write that was answered, and know of everything
that was decided and done; and nobody else may ever answer or do something again of which it does not know.
Everything follows from a seed.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
from rough_link import Link
from simulation.virtual_time import VirtualLoop, run

from understudy.recovery.base.control import pb
from understudy.recovery.membership.job_leadership import Leading, NotLed, claim, key_of, standby_key_of
from understudy.recovery.membership.records import read
from understudy.recovery.membership.stores.embedded import StoreMachine
from understudy.recovery.membership.stores.store import Change, ClusterStoreError, Put, Unchanged, Unreachable
from understudy.recovery.rendezvous.store import Store
from understudy.recovery.spanning.leader.cpu_images import Pair
from understudy.recovery.spanning.leader.member_link import MemberLink
from understudy.recovery.spanning.leader.standby_replication import NotLeft, Sources, StandbyReplication
from understudy.recovery.spanning.member.standby_state import NotKept, StandbyStates
from understudy.recovery.spanning.member.succession import Succession
from understudy.recovery.state.jobs import Job
from understudy.recovery.state.span import Span

ROUGH_S = 200.0
HEIR, LEADER = standby_key_of("c", "j"), key_of("c", "j")


class Loop(VirtualLoop):
    """Work for threads is done at once."""

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except OSError as problem:
            done.set_exception(problem)
        return done


class Lost(grpc.aio.AioRpcError):
    """No answer from another host."""

    def __init__(self) -> None:
        super().__init__(grpc.StatusCode.DEADLINE_EXCEEDED, grpc.aio.Metadata(), grpc.aio.Metadata(), "lost")


@dataclass
class Outcome:
    """Of one seed."""

    violations: list[str] = field(default_factory=list)
    writes: int = 0
    acts: int = 0
    named: int = 0
    voided: int = 0
    led_on: int = 0
    gave_way: int = 0


class World:
    """The cluster's store, and everybody's watchful eye on it."""

    def __init__(self, seed: int, loop: VirtualLoop, folder: Path) -> None:
        self.chance = random.Random(seed)
        self.loop, self.folder = loop, folder
        self.machine = StoreMachine()
        self.outcome = Outcome()
        self.rough = True
        self.answered: set[str] = set()
        self.acted = 0
        """The newest of what was decided and is done."""
        self.known: int | None = None
        """The newest of what was decided, as whoever leads the job on knows it."""
        self.leader = "a"
        """Whose the job is."""
        self.since = 0.0
        self.store_of: dict[str, Store] = {}
        self.token = b""

    def transact(self, conditions: Sequence[Unchanged], changes: Sequence[Change]) -> int:
        """As the machine, and looked at."""
        revision = self.machine.transact(conditions, changes)
        for change in changes if revision else ():
            if isinstance(change, Put) and change.key == HEIR:
                self._look(read(change.value, pb.JobHeir))
            elif isinstance(change, Put) and read(change.value, pb.JobLeader).host != self.leader:
                self.lead_on(read(change.value, pb.JobLeader).host)
        return revision

    def _look(self, standby: pb.JobHeir) -> None:
        self.outcome.named += bool(standby.host)
        self.outcome.voided += not standby.host and standby.leader == self.leader

    def lead_on(self, host: str) -> None:
        """Somebody has claimed the job."""
        if host == "a" or self.outcome.led_on:
            self.violate(f"{host} has claimed a job that {self.leader} leads")
        missing = {one for one in self.answered if self.store_of[host].done(one) is None}
        if missing:
            self.violate(f"{host} leads the job on and lacks {len(missing)} writes that were answered")
        self.outcome.led_on += 1
        self.leader, self.since = host, self.loop.time()

    def answer(self, host: str, request: str) -> None:
        """A worker hears that its write was done."""
        self.outcome.writes += 1
        self.answered.add(request)
        if self.store_of[self.leader].done(request) is None:
            self.violate(f"{host} has answered a write that {self.leader}, which leads, lacks")

    def goes_on(self, host: str, known: int) -> None:
        """It has what it was left."""
        self.known = known
        self._compare(host)

    def act(self, host: str, number: int) -> None:
        """What was decided is done."""
        self.outcome.acts += 1
        self.acted = max(self.acted, number)
        self._compare(host)

    def _compare(self, host: str) -> None:
        if self.known is not None and self.acted > self.known:
            self.violate(f"{self.leader} leads the job on and knows of decision {self.known} and not of "
                         f"{self.acted}, which was done (seen by {host})")  # fmt: skip

    def violate(self, what: str) -> None:
        self.outcome.violations.append(f"{what}, at {self.loop.time():.2f} s")


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
        self.standby_states = StandbyStates(Job("j", None, []), folder / "i" / self.name, lambda: self.store)
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

    async def suspect(self) -> None:
        """It believes, rightly or not, that host a is lost, and looks whether the job is its own."""
        while not self.leads:
            await asyncio.sleep(self.world.chance.uniform(1, 12))
            await self._look()

    async def _look(self) -> None:
        span = Span(3, self.world.token, "a")
        job, standby_states = Job("j", None, [], span=span), self.standby_states

        async def promote(job: Job) -> Any:
            self.leads = True
            self.world.goes_on(self.name, job.generation)
            return SimpleNamespace(
                images=None, run_beside=lambda work: work.close(), span=span, job=job,
                lost_hosts=SimpleNamespace(expect_loss=lambda former: former),
            )  # fmt: skip

        deputy: Any = SimpleNamespace(standby_states=standby_states, followed_at=0.0)
        succession = Succession(self.name, lambda: self.link, "c", promote)
        with suppress(Unreachable):
            await succession.why_over(job, deputy, (), "lost")
        if self.leads and span.leading is not None:
            leading = asyncio.ensure_future(span.leading.run(lambda _: None))
            number = itertools.count()
            while not leading.done():
                await self.write(f"{self.name}-{next(number)}")
                await asyncio.sleep(self.world.chance.uniform(0, 20))

    async def write(self, request: str) -> None:
        await self.store.add("k", 1, request)
        self.world.answer(self.name, request)


class Stub:
    """Host a's way to a member."""

    def __init__(self, way: Link, member: Member) -> None:
        self._way, self._member = way, member

    async def _asked(self, request: Any, work: Callable[[StandbyStates], Any]) -> pb.KeepReply:
        member = self._member
        try:
            reply = await self._way.through(lambda: member.keep(request, lambda: work(member.standby_states)))
        except Unreachable:
            raise Lost() from None
        assert isinstance(reply, pb.KeepReply)
        return reply

    async def KeepStore(self, request: Any, timeout: float) -> pb.KeepReply:
        return await self._asked(request, lambda standby_states: standby_states.keep_store(request))

    async def KeepJob(self, requests: Any, timeout: float) -> pb.KeepReply:
        asked = [request async for request in requests]

        async def again() -> Any:
            for request in asked:
                yield request

        return await self._asked(asked[0], lambda standby_states: standby_states.keep_job(again()))


class Leader:
    """Host a."""

    def __init__(self, world: World, members: dict[str, Member]) -> None:
        self.world, self.members = world, members
        self.link, self.ways = Link(world), {name: Link(world) for name in members}
        self.store = world.store_of["a"] = Store()
        self.numbers, self.pairs = itertools.count(), itertools.count(1)
        self.gone = False
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
        lead: Any = SimpleNamespace(
            span=SimpleNamespace(leading=leading), members=links, of=lambda member: [1],
            credentials=lambda: {"job": "j", "token": world.token, "leadership": leading.token},
        )  # fmt: skip
        for name, member in self.members.items():
            link = links[name] = MemberLink(lead, name)
            link.times = member.times
            link.stub = partial(Stub, self.ways[name], member)  # type: ignore[assignment, method-assign]
        sources = Sources(lambda job: self.store, None, None, lambda job: self._known())  # type: ignore[arg-type]
        standby = StandbyReplication(Job("j", None, []), lead, self.link, HEIR, sources, lambda _: None)
        work = [
            leading.run(self._give_way),
            standby.run(),
            self._leave(standby),
            self._see(links),
            self._decide(standby),
        ]
        work += [self._write(standby) for _ in range(3)]
        tasks = [asyncio.ensure_future(one) for one in work]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _give_way(self, host: str) -> None:
        if host != self.world.leader:
            self.world.violate(f"a gave way to {host}, and {self.world.leader} leads")
        self.world.outcome.gave_way += 1
        self.gone = True

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

    async def _leave(self, standby: StandbyReplication) -> None:
        while True:
            await asyncio.sleep(self.world.chance.uniform(0.5, 15))
            places: Any = {0: SimpleNamespace(log_offset=1, step=1)}
            pair = Pair(next(self.pairs), frozenset((0,)), places, self.world.folder)
            with suppress(NotLeft):
                await standby.leave(pair, [])

    def _known(self) -> pb.JournaledJob:
        return pb.JournaledJob(name="j", generation=self.decided)

    async def _decide(self, standby: StandbyReplication) -> None:
        while not self.gone:
            await asyncio.sleep(self.world.chance.expovariate(1 / 5))
            self.decided += 1
            await standby.settle_job()
            self.world.act("a", self.decided)

    async def _write(self, standby: StandbyReplication) -> None:
        while not self.gone:
            request = f"a-{next(self.numbers)}"
            if self.world.chance.random() < 0.2:
                self.store.delete(f"k{self.world.chance.randrange(3)}")
            await self.store.add("k", 1, request)
            await standby.settle()
            self.world.answer("a", request)
            await asyncio.sleep(self.world.chance.expovariate(1))


def simulate(seed: int, folder: Path) -> Outcome:
    """One seed."""
    loop = Loop()
    world = World(seed, loop, folder)
    chance = world.chance

    async def main() -> None:
        members = {name: Member(world, name) for name in "bc"}
        leader = Leader(world, members)
        living = asyncio.ensure_future(leader.live(first=True))
        standbys = {name: asyncio.ensure_future(one.suspect()) for name, one in members.items()}
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
                ("cut", "heal", "isolate", "join", "join", "die", "restart member", "nothing")
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
                    standbys[member.name] = asyncio.ensure_future(member.suspect())
        world.rough = False
        for way in (*ours, *(one.link for one in members.values())):
            way.cut = False
        await asyncio.sleep(60)
        owner = members.get(world.leader)
        if owner is not None and not owner.leads and owner.started < world.since:
            world.violate(f"{world.leader} has claimed the job and does not lead it")
        for task in (living, *standbys.values()):
            problem = task.exception() if task.done() and not task.cancelled() else None
            if problem is not None and not isinstance(problem, (ClusterStoreError, NotLed)):
                world.violate(f"it failed: {problem!r}")

    run(main(), loop)
    return world.outcome
