"""What every store of several hosts must do: the embedded one and a real etcd, by the same tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, suppress
from pathlib import Path

import pytest
from etcd_server import EtcdServer, free_port, running_etcd

from understudy.recovery.base.errors import BadInput
from understudy.recovery.config.cluster_options import parse_endpoints
from understudy.recovery.membership.stores.embedded import KEPT_EVENTS, EmbeddedStore, StoreMachine
from understudy.recovery.membership.stores.etcd import EtcdStore
from understudy.recovery.membership.stores.store import (
    ClusterStore,
    Compacted,
    Delete,
    DeleteRange,
    Entry,
    Event,
    LeaseEnded,
    Put,
    Unchanged,
    Unreachable,
    below,
)

pytestmark = pytest.mark.drawn(2)

WITHIN_S = 20.0
Checks = Callable[[Callable[[ClusterStore], Awaitable[None]]], None]


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture(params=["embedded", "etcd"])
def check(request: pytest.FixtureRequest) -> Checks:
    """Runs a test's checks on an empty store; they must be over in time."""

    def run(checks: Callable[[ClusterStore], Awaitable[None]]) -> None:
        async def main() -> None:
            store: ClusterStore = EmbeddedStore()
            if request.param == "etcd":
                store = EtcdStore(parse_endpoints(request.getfixturevalue("etcd").url))
                for entry in (await store.list("t/")).entries:
                    await store.delete(entry.key)
            try:
                await asyncio.wait_for(checks(store), WITHIN_S)
            finally:
                await store.close()

        asyncio.run(main())

    return run


async def some(count: int, events: AsyncIterator[Event]) -> list[Event]:
    """The first so many."""
    found = []
    async for event in events:
        found.append(event)
        if len(found) == count:
            break
    return found


def test_what_was_put_is_what_is_read_and_each_change_has_a_newer_revision(check: Checks) -> None:
    async def checks(store: ClusterStore) -> None:
        assert await store.get("t/a") is None
        first = await store.put("t/a", b"\0one")
        second = await store.put("t/a", b"two")
        assert second > first
        assert await store.get("t/a") == Entry("t/a", b"two", second)
        await store.delete("t/a")
        await store.delete("t/a")
        assert await store.get("t/a") is None

    check(checks)


def test_a_listing_has_what_begins_with_its_prefix_in_order_and_nothing_else(check: Checks) -> None:
    async def checks(store: ClusterStore) -> None:
        for key in ("t/b/2", "t/b/1", "t/bb", "t/a"):
            await store.put(key, key.encode())
        listing = await store.list("t/b/")
        assert [entry.key for entry in listing.entries] == ["t/b/1", "t/b/2"]
        assert listing.revision >= max(entry.revision for entry in listing.entries)
        assert (await store.list("t/none/")).entries == ()

    check(checks)


def test_a_listing_of_more_than_one_answer_holds_is_of_one_revision(check: Checks) -> None:
    """Each value is as large as etcd takes it, or nearly."""

    async def checks(store: ClusterStore) -> None:
        number = 0
        try:
            for number in range(70):
                value = bytes([number]) * (1 << 20)
                await store.transact((Unchanged("t/gone", 0),), [Put(f"t/{number:03d}", value)])
            listing = await store.list("t/")
            assert [(entry.key, entry.value[:1]) for entry in listing.entries] == [
                (f"t/{number:03d}", bytes([number])) for number in range(70)
            ]
            assert {len(entry.value) for entry in listing.entries} == {1 << 20}
            assert listing.revision == listing.entries[-1].revision
        finally:
            await store.transact((), [below("t/")])

    check(checks)


def test_a_range_of_keys_goes_at_once_with_what_else_a_transaction_changes(check: Checks) -> None:
    async def checks(store: ClusterStore) -> None:
        for key in ("t/1", "t/2", "t/3", "tt"):
            await store.put(key, b"v")
        before = await store.list("t/")
        assert await store.transact([Unchanged("t/1", 1)], [DeleteRange("t/", "t/3")]) == 0
        changed = await store.transact([Unchanged("t/4", 0)], [DeleteRange("t/", "t/3"), Put("t/4", b"v")])
        assert [entry.key for entry in (await store.list("t/")).entries] == ["t/3", "t/4"]
        async with aclosing(store.watch("t/", before.revision)) as events:
            told = await some(3, events)
        assert {(one.key, one.entry is None, one.revision) for one in told} == {
            ("t/1", True, changed), ("t/2", True, changed), ("t/4", False, changed),
        }  # fmt: skip
        await store.transact((), [below("t/")])
        assert (await store.list("t/")).entries == () and await store.get("tt") is not None
        await store.delete("tt")

    check(checks)


def test_a_swap_succeeds_only_for_who_knows_the_last_change(check: Checks) -> None:
    async def checks(store: ClusterStore) -> None:
        created = await store.swap("t/a", 0, b"mine")
        assert created > 0
        assert await store.swap("t/a", 0, b"another's") == 0
        changed = await store.swap("t/a", created, b"mine again")
        assert changed > created
        assert await store.swap("t/a", created, b"stale") == 0
        assert await store.get("t/a") == Entry("t/a", b"mine again", changed)

    check(checks)


def test_a_transaction_makes_all_of_its_changes_or_none(check: Checks) -> None:
    async def checks(store: ClusterStore) -> None:
        a = await store.put("t/a", b"1")
        changes = (Put("t/b", b"2"), Delete("t/a"))
        assert await store.transact((Unchanged("t/a", a), Unchanged("t/c", a)), changes) == 0
        assert [entry.key for entry in (await store.list("t/")).entries] == ["t/a"]
        done = await store.transact((Unchanged("t/a", a), Unchanged("t/c", 0)), changes)
        assert (await store.list("t/")).entries == (Entry("t/b", b"2", done),)

    check(checks)


def test_of_many_who_swap_at_once_one_succeeds(check: Checks) -> None:
    async def checks(store: ClusterStore) -> None:
        won = await asyncio.gather(*(store.swap("t/a", 0, bytes([number])) for number in range(20)))
        assert sum(revision > 0 for revision in won) == 1
        entry = await store.get("t/a")
        assert entry is not None and entry.value == bytes([won.index(max(won))])

    check(checks)


def test_keys_under_a_lease_go_when_it_is_revoked_and_others_stay(check: Checks) -> None:
    async def checks(store: ClusterStore) -> None:
        lease = await store.grant(30)
        await store.put("t/mine", b"", lease)
        await store.put("t/was", b"", lease)
        await store.put("t/was", b"now free")
        entry = await store.get("t/mine")
        assert entry is not None and entry.lease == lease
        left, granted = await store.remaining(lease)
        assert 0 < left <= granted == 30
        await store.revoke(lease)
        await store.revoke(lease)
        assert [entry.key for entry in (await store.list("t/")).entries] == ["t/was"]
        assert await store.remaining(lease) == (0, 0)

    check(checks)


def test_a_lease_that_nobody_keeps_ends_and_a_watch_tells_of_its_keys(check: Checks) -> None:
    async def checks(store: ClusterStore) -> None:
        lease = await store.grant(1)
        revision = await store.put("t/a", b"", lease)
        async with aclosing(store.watch("t/", revision)) as events:
            (gone,) = await some(1, events)
        assert (gone.key, gone.entry) == ("t/a", None) and gone.revision > revision
        assert await store.get("t/a") is None
        with pytest.raises(LeaseEnded):
            await store.keep(lease)
        with pytest.raises(LeaseEnded):
            await store.put("t/a", b"", lease)
        taken = await store.put("t/b", b"")
        assert await store.transact((Unchanged("t/b", taken - 1),), (Put("t/a", b"", lease),)) == 0

    check(checks)


def test_a_lease_that_is_kept_outlives_its_time(check: Checks) -> None:
    async def checks(store: ClusterStore) -> None:
        kept, left = await store.grant(2), await store.grant(2)
        revision = await store.put("t/kept", b"", kept)
        await store.put("t/left", b"", left)

        async def keep() -> None:
            while await store.keep(kept) == 2:
                await asyncio.sleep(0.2)

        keeping = asyncio.create_task(keep())
        async with aclosing(store.watch("t/left", revision)) as events:
            assert [event.entry is None for event in await some(2, events)] == [False, True]
        keeping.cancel()
        assert await store.get("t/kept") is not None

    check(checks)


def test_a_watch_tells_every_change_since_a_revision_in_order(check: Checks) -> None:
    async def checks(store: ClusterStore) -> None:
        start = await store.put("t/before", b"")
        await store.put("t/a", b"1")
        await store.put("elsewhere", b"")
        async with aclosing(store.watch("t/", start)) as events:
            watching = asyncio.create_task(some(4, events))
            await store.put("t/a", b"2")
            await store.transact((), (Put("t/b", b"3"),))
            await store.delete("t/a")
            found = await watching
        assert [(one.key, one.entry.value if one.entry else None) for one in found] == [
            ("t/a", b"1"), ("t/a", b"2"), ("t/b", b"3"), ("t/a", None),
        ]  # fmt: skip
        assert [one.revision for one in found] == sorted({one.revision for one in found})

    check(checks)


# ------------------------------------------------------------------ each for itself
def test_a_watch_from_a_forgotten_revision_says_so_rather_than_skip_changes() -> None:
    machine = StoreMachine()
    first = machine.transact((), (Put("t/0", b""),))
    for number in range(KEPT_EVENTS):
        machine.transact((), (Put(f"t/{number}", b""),))
    assert len(machine.after("t/", first)) == KEPT_EVENTS
    with pytest.raises(Compacted):
        machine.after("t/", first - 1)


def test_an_etcd_that_compacted_what_a_watch_needs_says_so(etcd: EtcdServer) -> None:
    from aetcd import rpc

    async def main() -> None:
        store = EtcdStore(parse_endpoints(etcd.url))
        first = await store.put("t/a", b"")
        last = await store.put("t/a", b"")
        await rpc.KVStub(store._channels[0]).Compact(rpc.CompactionRequest(revision=last))
        with pytest.raises(Compacted):
            await asyncio.wait_for(some(1, store.watch("t/", first - 1)), WITHIN_S)
        await store.close()

    asyncio.run(main())


def test_every_call_to_an_etcd_that_does_not_answer_ends_within_its_deadline(tmp_path: Path) -> None:
    async def main(server: EtcdServer) -> None:
        loop = asyncio.get_running_loop()
        patient, store = (EtcdStore(parse_endpoints(server.url), deadline_s=limit) for limit in (30.0, 0.5))
        lease = await patient.grant(300)
        with suppress(Unreachable):
            await store.get("t/a")  # so that there is a connection
        server.freeze()
        calls = [
            store.get("t/a"), store.list("t/"), store.put("t/a", b""), store.grant(5), store.keep(lease),
            store.remaining(lease), store.revoke(lease),
        ]  # fmt: skip
        began = loop.time()
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, Unreachable) and "did not answer within 0.5 s" in str(outcome)
        assert loop.time() - began < 10
        server.thaw()
        await patient.put("t/a", b"")
        server.kill()
        with pytest.raises(Unreachable, match=r"does not answer|did not answer"):
            await store.get("t/a")
        with pytest.raises(Unreachable):
            await asyncio.wait_for(some(1, store.watch("t/", 1)), WITHIN_S)
        for one in (patient, store):
            await one.close()

    with running_etcd(tmp_path) as server:
        asyncio.run(main(server))


def test_of_two_endpoints_the_one_that_answers_is_used(etcd: EtcdServer) -> None:
    async def main() -> None:
        store = EtcdStore(parse_endpoints(f"http://127.0.0.1:{free_port()},{etcd.url}"))
        assert await store.get("t/none") is None
        assert await store.put("t/a", b"here") > 0
        await store.close()

    asyncio.run(main())


def test_addresses_of_etcd_are_urls() -> None:
    (first, second, third) = parse_endpoints("http://10.0.0.1:23790, https://etcd-2/,http://[::1]:1")
    assert (first.target, first.encrypted) == ("10.0.0.1:23790", False)
    assert (second.target, second.encrypted) == ("etcd-2:2379", True)
    assert third.target == "[::1]:1"
    for text in (
        "",
        "10.0.0.1",
        "http://",
        "http://a:0",
        "http://a:99999",
        "http://a,",
        "unix:///a",
        "http://a/b",
    ):
        with pytest.raises(BadInput, match="no address of etcd"):
            parse_endpoints(text)
