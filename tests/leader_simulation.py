"""Candidates for the lead of a job in virtual time.

Links lose, hold up and are cut, clocks run fast or slow, leaders die or stand still at the worst moment.
Everything follows from a seed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from simulation.virtual_time import VirtualLoop, run

from recovery.control import pb
from recovery.membership.decisions import DecisionLog, Fence, Recorded, Undone
from recovery.membership.election import Deposed, Leadership, campaign, lead
from recovery.membership.embedded import StoreMachine
from recovery.membership.records import read
from recovery.membership.store import (
    Change,
    ClusterStore,
    ClusterStoreError,
    Entry,
    Event,
    Listing,
    Put,
    Unchanged,
    Unreachable,
)

TTL_S = 10.0
DEADLINE_S = 2.0
ROUGH_S = 120.0
"""How long things go wrong; then half as long again in which nothing does."""
DEVICES = 3
LEADER_KEY = "understudy/c/jobs/job/leader"


@dataclass
class Outcome:
    """Of one seed."""

    violations: list[str] = field(default_factory=list)
    elections: int = 0
    decisions: int = 0
    fenced: int = 0
    redone: int = 0


class World:
    """The store, the devices, and everybody's watchful eye on them."""

    def __init__(self, seed: int, loop: VirtualLoop) -> None:
        self.chance = random.Random(seed)
        self.loop = loop
        self.machine = StoreMachine()
        self.outcome = Outcome()
        self.fences = [Fence() for _ in range(DEVICES)]
        self.fences_hold = True
        self.acts: list[list[tuple[int, int]]] = [[] for _ in range(DEVICES)]
        self.decided: dict[int, str] = {}
        self.rough = True

    def transact(self, conditions: Sequence[Unchanged], changes: Sequence[Change]) -> int:
        """As the machine, and looked at."""
        leader = self.machine.get(LEADER_KEY)
        revision = self.machine.transact(conditions, changes)
        for change in changes if revision else ():
            if change.key == LEADER_KEY:
                self.outcome.elections += 1
                if leader is not None:
                    self.violate("a leader was elected beside another")
            elif isinstance(change, Put):
                self._look(read(change.value, pb.Decision), conditions, leader)
        return revision

    def _look(self, decision: pb.Decision, conditions: Sequence[Unchanged], leader: Entry | None) -> None:
        if leader is None or not any(one.key == leader.key for one in conditions):
            self.violate(f"decision {decision.number} was written by somebody who does not lead")
        elif not decision.done and decision.token != leader.revision:
            self.violate(f"decision {decision.number} has the token of a former leader")
        if self.decided.setdefault(decision.number, decision.plan) != decision.plan:
            self.violate(f"decision {decision.number} became another one")
        if decision.number > 1 and decision.number - 1 not in self.decided:
            self.violate(f"decision {decision.number - 1} was lost")

    def act(self, device: int, token: int, decision: pb.Decision) -> bool:
        """An order arrives."""
        if self.fences_hold and not self.fences[device].admit(token, decision.number):
            self.outcome.fenced += 1
            return False
        if self.decided.get(decision.number) != decision.plan:
            self.violate(f"device {device} carried out a decision that is not written down")
        if self.acts[device] and (token, decision.number) < self.acts[device][-1]:
            self.violate(f"device {device} followed a former leader, or an old order")
        self.acts[device].append((token, decision.number))
        return True

    def violate(self, what: str) -> None:
        self.outcome.violations.append(f"{what}, at {self.loop.time():.2f} s")

    def settle(self) -> None:
        """What must hold in the end, after a quiet time."""
        self.machine.advance(self.loop.time())
        if self.machine.get(LEADER_KEY) is None:
            self.violate("nobody leads")
        for number in sorted(self.decided):
            for device in range(DEVICES):
                if all(acted != number for _, acted in self.acts[device]) and number < max(self.decided):
                    self.violate(f"decision {number} was never carried out by device {device}")
        self.outcome.decisions = len(self.decided)


class Link(ClusterStore):
    """A candidate's way to the store; what it asks may arrive late, after it has given up waiting."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.cut = False

    async def through(self, do: Callable[[], Any]) -> Any:
        """Ask somebody else to `do` something; raises Unreachable."""
        loop, chance = self._world.loop, self._world.chance
        if self.cut or (self._world.rough and chance.random() < 0.03):
            await asyncio.sleep(DEADLINE_S)
            raise Unreachable("lost on its way")
        answer: asyncio.Future[Any] = loop.create_future()

        def arrive() -> None:
            try:
                outcome, failed = do(), None
            except ClusterStoreError as problem:
                outcome, failed = None, problem
            if self.cut or (self._world.rough and chance.random() < 0.03):
                return  # the answer is lost
            loop.call_later(self._delay(), reply, outcome, failed)

        def reply(outcome: Any, failed: ClusterStoreError | None) -> None:
            if not answer.done():
                answer.set_exception(failed) if failed is not None else answer.set_result(outcome)

        loop.call_later(self._delay(), arrive)
        try:
            return await asyncio.wait_for(answer, DEADLINE_S)
        except TimeoutError:
            raise Unreachable("no answer") from None

    def _delay(self) -> float:
        chance = self._world.chance
        if self._world.rough and chance.random() < 0.05:
            return chance.uniform(0, 3 * TTL_S)
        return chance.uniform(0.001, 0.05)

    async def store(self, do: Callable[[StoreMachine], Any]) -> Any:
        def with_time() -> Any:
            self._world.machine.advance(self._world.loop.time())
            return do(self._world.machine)

        return await self.through(with_time)

    async def get(self, key: str) -> Entry | None:
        found: Entry | None = await self.store(lambda machine: machine.get(key))
        return found

    async def list(self, prefix: str) -> Listing:
        found: Listing = await self.store(lambda machine: machine.list(prefix))
        return found

    async def transact(self, conditions: Sequence[Unchanged], changes: Sequence[Change]) -> int:
        return int(await self.store(lambda _: self._world.transact(conditions, changes)))

    async def grant(self, ttl_s: float) -> int:
        return int(await self.store(lambda machine: machine.grant(ttl_s, self._world.loop.time())))

    async def keep(self, lease: int) -> float:
        return float(await self.store(lambda machine: machine.keep(lease, self._world.loop.time())))

    async def remaining(self, lease: int) -> tuple[float, float]:
        raise NotImplementedError

    async def revoke(self, lease: int) -> None:
        await self.store(lambda machine: machine.revoke(lease))

    async def watch(self, prefix: str, after: int) -> AsyncGenerator[Event, None]:
        while True:
            for event in await self.store(lambda machine, after=after: machine.after(prefix, after)):  # type: ignore[misc]
                after = max(after, event.revision)
                yield event
            await asyncio.sleep(1)

    async def close(self) -> None: ...


class Candidate:
    """A proxyd that leads when it can: finishes what it finds, then decides something new now and then."""

    def __init__(self, world: World, name: str, log: Callable[[ClusterStore], DecisionLog]) -> None:
        self.world, self.name = world, name
        self.link = Link(world)
        self.log = log(self.link)
        self.rate = world.chance.choice((0.5, 0.9, 1.0, 1.1, 2.0))
        """Of its clock."""

    def clock(self) -> float:
        return self.world.loop.time() * self.rate

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self.rate)

    async def live(self) -> None:
        while True:
            leadership = await campaign(
                self.link, self.log.leader_key, self.name, TTL_S, clock=self.clock, sleep=self.sleep
            )
            working = asyncio.ensure_future(self._work(leadership))
            keeping = asyncio.ensure_future(lead(self.link, leadership, clock=self.clock, sleep=self.sleep))
            try:
                await asyncio.wait({working, keeping}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (working, keeping):
                    task.cancel()
                for ended in await asyncio.gather(working, keeping, return_exceptions=True):
                    if isinstance(ended, Exception) and not isinstance(ended, ClusterStoreError):
                        raise ended

    async def _work(self, leadership: Leadership) -> None:
        while True:
            with suppress(Unreachable, Undone):
                recorded = await self.log.newest()
                if recorded is None or recorded.decision.done:
                    await asyncio.sleep(self.world.chance.uniform(0, 5))
                    plan = f"{self.name} at {self.world.loop.time()}"
                    recorded = await self.log.decide(leadership, self.name, "plan", plan, 0)
                elif recorded.decision.token != leadership.token:
                    self.world.outcome.redone += 1
                await self._stand_still()
                await self._carry_out(leadership, recorded)
            await asyncio.sleep(0.1)

    async def _carry_out(self, leadership: Leadership, recorded: Recorded) -> None:
        for device in range(DEVICES):

            def order(device: int = device) -> bool:
                return self.world.act(device, leadership.token, recorded.decision)

            if not await self.link.through(order):
                raise Deposed("a device follows another leader")
            await self._stand_still()
        await self.log.finish(leadership, recorded, "done")

    async def _stand_still(self) -> None:
        """As a process does that is stopped, or swapped out, between two steps."""
        if self.world.rough and self.world.chance.random() < 0.02:
            await asyncio.sleep(self.world.chance.uniform(0, 3 * TTL_S))


def simulate(
    seed: int, log: Callable[[ClusterStore], DecisionLog] = lambda store: DecisionLog(store, "c", "job"),
    fences_hold: bool = True,
) -> Outcome:  # fmt: skip
    """One seed."""
    loop = VirtualLoop()
    world = World(seed, loop)
    world.fences_hold = fences_hold

    async def main() -> None:
        candidates = [Candidate(world, name, log) for name in "abc"]
        tasks = {one.name: asyncio.ensure_future(one.live()) for one in candidates}
        while loop.time() < ROUGH_S:
            await asyncio.sleep(world.chance.expovariate(1 / 8))
            victim = world.chance.choice(candidates)
            match world.chance.choice(("cut", "heal", "die", "nothing")):
                case "cut":
                    victim.link.cut = True
                case "heal":
                    victim.link.cut = False
                case "die":
                    tasks[victim.name].cancel()
                    await asyncio.gather(tasks[victim.name], return_exceptions=True)
                    tasks[victim.name] = asyncio.ensure_future(victim.live())
        world.rough = False
        for candidate in candidates:
            candidate.link.cut = False
        await asyncio.sleep(ROUGH_S / 2)
        for task in tasks.values():
            if task.done():
                task.result()
        world.settle()

    run(main(), loop)
    return world.outcome
