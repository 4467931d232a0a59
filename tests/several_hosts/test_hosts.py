"""Hosts that register, fall silent and come back, in virtual time over a store that can be cut off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

import pytest
from simulation.virtual_time import VirtualLoop, run

from understudy.protos import control_pb2 as pb
from understudy.recovery.base.timing import TIMING
from understudy.recovery.membership.hosts import Hosts
from understudy.recovery.membership.records import Keys, read
from understudy.recovery.membership.registration import NameTaken, Registration
from understudy.recovery.membership.stores.embedded import EmbeddedStore
from understudy.recovery.membership.stores.store import (
    Change,
    ClusterStore,
    Entry,
    Event,
    Listing,
    Unchanged,
    Unreachable,
)
from understudy.recovery.planning.agreement import HostState, Vote

KEYS = Keys("c")


class Link(ClusterStore):
    """One host's way to the common store, which can be cut."""

    def __init__(self, store: ClusterStore) -> None:
        self._store = store
        self.cut = asyncio.Event()

    async def _through(self, call: Awaitable[object]) -> object:
        if self.cut.is_set():
            call.close()  # type: ignore[attr-defined]
            raise Unreachable("the link is cut")
        return await call

    async def get(self, key: str) -> Entry | None:
        return await self._through(self._store.get(key))  # type: ignore[return-value]

    async def list(self, prefix: str) -> Listing:
        return await self._through(self._store.list(prefix))  # type: ignore[return-value]

    async def transact(self, conditions: Sequence[Unchanged], changes: Sequence[Change]) -> int:
        return await self._through(self._store.transact(conditions, changes))  # type: ignore[return-value]

    async def grant(self, ttl_s: float) -> int:
        return await self._through(self._store.grant(ttl_s))  # type: ignore[return-value]

    async def keep(self, lease: int) -> float:
        return await self._through(self._store.keep(lease))  # type: ignore[return-value]

    async def remaining(self, lease: int) -> tuple[float, float]:
        return await self._through(self._store.remaining(lease))  # type: ignore[return-value]

    async def revoke(self, lease: int) -> None:
        await self._through(self._store.revoke(lease))

    async def watch(self, prefix: str, after: int) -> AsyncGenerator[Event, None]:
        events = self._store.watch(prefix, after)
        while True:
            coming = asyncio.ensure_future(anext(events))
            cut = asyncio.ensure_future(self.cut.wait())
            await asyncio.wait({coming, cut}, return_when=asyncio.FIRST_COMPLETED)
            if cut.done():
                coming.cancel()
                raise Unreachable("the link is cut")
            cut.cancel()
            yield coming.result()

    async def close(self) -> None: ...


class Host:
    """A host of the test: registration, view of the others, and a link."""

    def __init__(self, cluster: Cluster, name: str, instance: str = "first", socket: str = "") -> None:
        self.cluster, self.name = cluster, name
        self.link = Link(cluster.store)
        self.devices = 1
        self.instance, self.socket = instance, socket or name
        clock = asyncio.get_running_loop().time
        self.registration = Registration(self.link, KEYS, self.record, clock)
        self.hosts = Hosts(self.link, KEYS, name, self, clock)
        self.tasks: list[asyncio.Task[None]] = []

    def record(self) -> pb.HostRecord:
        return pb.HostRecord(
            version=1, name=self.name, boot_id="boot", socket=self.socket, instance=self.instance,
            node=pb.Node(devices=[pb.Device(spec=f"cpu:{number}") for number in range(self.devices)]),
        )  # fmt: skip

    async def votes(self, target: pb.HostRecord, others: Mapping[str, pb.HostRecord]) -> Mapping[str, Vote]:
        """As Peers."""
        reached = Vote(target.name not in self.cluster.unreachable)
        return {self.name: reached} | {other: reached for other in others}

    async def start(self) -> Host:
        await self.registration.register()
        for work in (self.registration.run(), self.hosts.followed.run(), self.hosts.run()):
            self.tasks.append(asyncio.create_task(work))
        return self

    def die(self) -> None:
        for task in self.tasks:
            task.cancel()

    async def seen(self) -> dict[str, str]:
        """What it thinks of everybody."""
        standings, problems = await self.hosts.standings()
        assert problems == []
        return {standing.record.name: standing.state for standing in standings}


class Cluster:
    """The store all hosts share, and who of them does not answer the others."""

    def __init__(self) -> None:
        self.store = EmbeddedStore()
        self.unreachable: set[str] = set()


def in_virtual_time(scene: Callable[[Cluster], Awaitable[None]]) -> None:
    loop = VirtualLoop()

    async def main() -> None:
        await asyncio.wait_for(scene(Cluster()), 1000)

    run(main(), loop)


def test_hosts_see_each_other_and_what_changes_about_them() -> None:
    async def scene(cluster: Cluster) -> None:
        a, b = await Host(cluster, "a").start(), await Host(cluster, "b").start()
        await asyncio.sleep(60)
        assert await a.seen() == await b.seen() == {"a": "alive", "b": "alive"}
        b.devices = 3
        await asyncio.sleep(3)
        (_, standing), _ = await a.hosts.standings()
        assert len(standing.record.node.devices) == 3
        assert 0 <= standing.sign_age_s <= TIMING.lease_s / 3 + 1

    in_virtual_time(scene)


def test_host_that_dies_is_suspected_when_its_lease_ends_and_lost_when_peers_agree() -> None:
    async def scene(cluster: Cluster) -> None:
        a, b = await Host(cluster, "a").start(), await Host(cluster, "b").start()
        await asyncio.sleep(5)
        b.die()
        died = asyncio.get_running_loop().time()
        await asyncio.sleep(TIMING.lease_s - 5)
        assert (await a.seen())["b"] == "alive"
        await asyncio.sleep(8)
        assert (await a.seen())["b"] == "suspected"
        cluster.unreachable.add("b")
        await asyncio.sleep(5)
        assert (await a.seen())["b"] == "lost"
        (_, standing), _ = await a.hosts.standings()
        assert died + TIMING.lease_s / 2 < standing.since_ms / 1000 < died + TIMING.lease_s + 2
        assert "1 of 1 that could be asked do not reach it (a)" in standing.why

    in_virtual_time(scene)


def test_only_a_lost_host_can_be_forgotten_and_it_may_come_back_all_the_same() -> None:
    async def scene(cluster: Cluster) -> None:
        a, b = await Host(cluster, "a").start(), await Host(cluster, "b").start()
        await asyncio.sleep(5)
        assert await a.hosts.forget("c") == "no host c is registered"
        assert (await a.hosts.forget("b")).startswith("host b is alive: only a host that is lost")
        b.die()
        await asyncio.sleep(TIMING.lease_s + 3)
        assert (await a.hosts.forget("b")).startswith("host b is suspected: only a host that is lost")
        cluster.unreachable.add("b")
        await asyncio.sleep(5)
        assert await a.seen() == {"a": "alive", "b": "lost"}
        a.link.cut.set()
        with pytest.raises(Unreachable):
            await a.hosts.forget("b")
        await asyncio.sleep(5)
        assert (await a.hosts.forget("b")).startswith("host b is unknown")
        a.link.cut.clear()
        await asyncio.sleep(5)
        assert await a.hosts.forget("b") == ""
        await asyncio.sleep(5)
        assert await a.seen() == {"a": "alive"}
        assert {entry.key.split("/")[-2] for entry in (await cluster.store.list("")).entries} == {"a"}
        cluster.unreachable.discard("b")
        await Host(cluster, "b", "second").start()
        await asyncio.sleep(5)
        assert await a.seen() == {"a": "alive", "b": "alive"}

    in_virtual_time(scene)


def test_all_hosts_tell_the_same_time_of_a_loss() -> None:
    async def scene(cluster: Cluster) -> None:
        hosts = [await Host(cluster, name).start() for name in "abc"]
        hosts[2].die()
        cluster.unreachable.add("c")
        await asyncio.sleep(30)
        told = [(await host.hosts.standings())[0][2] for host in hosts[:2]]
        assert {standing.state for standing in told} == {"lost"}
        assert len({standing.since_ms for standing in told}) == 1

    in_virtual_time(scene)


def test_host_that_only_lost_sight_of_the_store_is_never_lost_and_registers_again() -> None:
    async def scene(cluster: Cluster) -> None:
        a, b = await Host(cluster, "a").start(), await Host(cluster, "b").start()
        await asyncio.sleep(2)
        b.link.cut.set()
        await asyncio.sleep(60)
        assert (await a.seen())["b"] == "suspected"
        assert await b.seen() == {"a": "unknown", "b": "unknown"}
        assert b.registration.trouble == "the link is cut"
        assert 0 < b.registration.trouble_since_ms < 5000
        b.link.cut.clear()
        await asyncio.sleep(5)
        assert await a.seen() == await b.seen() == {"a": "alive", "b": "alive"}
        assert (b.registration.trouble, b.registration.trouble_since_ms) == ("", 0)
        assert await cluster.store.get(KEYS.absent("b")) is None

    in_virtual_time(scene)


def test_host_that_is_stopped_leaves_nothing_and_is_not_lost() -> None:
    async def scene(cluster: Cluster) -> None:
        a, b = await Host(cluster, "a").start(), await Host(cluster, "b").start()
        b.die()
        await b.registration.leave()
        await asyncio.sleep(60)
        assert await a.seen() == {"a": "alive"}
        assert {entry.key.split("/")[-2] for entry in (await cluster.store.list("")).entries} == {"a"}

    in_virtual_time(scene)


def test_name_of_a_living_host_is_refused_but_a_dead_proxyd_at_the_same_socket_is_succeeded() -> None:
    async def scene(cluster: Cluster) -> None:
        first = await Host(cluster, "a").start()
        with pytest.raises(NameTaken, match="a host a is registered and alive"):
            await Host(cluster, "a", "second", "elsewhere").registration.register()
        first.die()
        second = await Host(cluster, "a", "second").start()
        entry = await cluster.store.get(KEYS.record("a"))
        assert entry is not None and read(entry.value, pb.HostRecord).instance == "second"
        await asyncio.sleep(60)
        assert await second.seen() == {"a": "alive"}
        second.die()
        await asyncio.sleep(TIMING.lease_s + 1)
        await Host(cluster, "a", "third", "elsewhere").registration.register()

    in_virtual_time(scene)


def test_host_whose_place_was_taken_while_it_was_cut_off_says_so_and_does_not_fight_for_it() -> None:
    async def scene(cluster: Cluster) -> None:
        first = await Host(cluster, "a").start()
        first.link.cut.set()
        await asyncio.sleep(TIMING.lease_s + 5)
        second = await Host(cluster, "a", "second", "elsewhere").start()
        first.link.cut.clear()
        await asyncio.sleep(60)
        assert "a host a is registered and alive" in first.registration.trouble
        assert second.registration.trouble == ""

    in_virtual_time(scene)


def test_record_that_makes_no_sense_is_told_and_harms_no_other() -> None:
    async def scene(cluster: Cluster) -> None:
        a = await Host(cluster, "a").start()
        await cluster.store.put(KEYS.record("b"), b"\xff")
        await cluster.store.put(KEYS.record("c"), (await a.link.get(KEYS.record("a"))).value)  # type: ignore[union-attr]
        await cluster.store.put(KEYS.hosts + "\x1b[2J/record", b"")
        await asyncio.sleep(5)
        standings, problems = await a.hosts.standings()
        assert [standing.record.name for standing in standings] == ["a"]
        assert problems == [
            "what is registered of host b is not used: it is not JSON of a HostRecord",
            "what is registered of host c is not used: it is that of another host",
        ]

    in_virtual_time(scene)


def test_host_that_counts_as_gone_itself_judges_nobody() -> None:
    async def scene(cluster: Cluster) -> None:
        a, b = await Host(cluster, "a").start(), await Host(cluster, "b").start()
        for host in (a, b):
            host.tasks[0].cancel()  # neither renews its lease, both look at the other
        cluster.unreachable |= {"a", "b"}
        await asyncio.sleep(60)
        assert HostState.LOST not in (await a.seen()).values()

    in_virtual_time(scene)
