"""One leader at a time: of the store in memory and of etcd."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest
from etcd_server import EtcdServer, running_etcd

from understudy.recovery.base.timing import Timing
from understudy.recovery.config.cluster_options import parse_endpoints
from understudy.recovery.membership.election import Deposed, lead
from understudy.recovery.membership.job_leadership import Claim, NotLed, claim
from understudy.recovery.membership.stores.embedded import EmbeddedStore
from understudy.recovery.membership.stores.etcd import EtcdStore
from understudy.recovery.membership.stores.store import ClusterStore, LeaseEnded

Checks = Callable[[Callable[[ClusterStore], Awaitable[None]]], None]


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture(params=["embedded", "etcd"])
def check(request: pytest.FixtureRequest) -> Checks:
    """Runs a test's checks; they must be over in time."""

    def run(checks: Callable[[ClusterStore], Awaitable[None]]) -> None:
        async def main() -> None:
            store: ClusterStore = EmbeddedStore()
            if request.param == "etcd":
                store = EtcdStore(parse_endpoints(request.getfixturevalue("etcd").url))
            try:
                await asyncio.wait_for(checks(store), 60)
            finally:
                await store.close()

        asyncio.run(main())

    return run


def test_the_next_leader_has_a_greater_token(check: Checks) -> None:
    async def checks(store: ClusterStore) -> None:
        first = (await claim(store, "c", "handover", "a", 2)).leadership
        assert first is not None
        assert (await claim(store, "c", "handover", "b", 2)).leadership is None
        await store.revoke(first.lease)
        second = (await claim(store, "c", "handover", "b", 2)).leadership
        assert second is not None and second.token > first.token
        assert not await store.transact([first.holds], []) and await store.transact([second.holds], [])

    check(checks)


def test_leader_whose_lease_ends_is_told_and_another_one_follows(check: Checks) -> None:
    timing = Timing(lease_s=2)

    async def checks(store: ClusterStore) -> None:
        first = (await claim(store, "c", "lease", "a", 2, timing=timing)).leadership
        assert first is not None
        leading = asyncio.ensure_future(lead(store, first))
        done, _ = await asyncio.wait({leading}, timeout=3)
        assert not done  # it is kept for longer than its time
        assert (await claim(store, "c", "lease", "b", 2, timing=timing)).leadership is None
        await store.revoke(first.lease)
        second = (await claim(store, "c", "lease", "b", 2, timing=timing)).leadership
        assert second is not None and second.token > first.token
        with pytest.raises(Deposed):
            await leading

    check(checks)


class Forgetful(EmbeddedStore):
    """Keeps no lease."""

    async def keep(self, lease: int) -> float:
        raise LeaseEnded("gone")


def test_leader_whose_lease_is_gone_knows_at_once() -> None:
    async def main() -> None:
        store = Forgetful()
        first = (await claim(store, "c", "gone", "a", 2)).leadership
        assert first is not None
        with pytest.raises(Deposed, match="has ended"):
            await asyncio.wait_for(lead(store, first), 10)

    asyncio.run(main())


def test_of_many_candidates_one_leads_at_a_time(check: Checks) -> None:
    async def checks(store: ClusterStore) -> None:
        async def candidate(name: str) -> Claim | None:
            try:
                return await claim(store, "c", "many", name, 6)
            except NotLed:  # it changed this very moment
                return None

        claims = await asyncio.gather(*(candidate(name) for name in "abcdef"))
        [leader] = [one.record.host for one in claims if one is not None and one.leadership is not None]
        assert {one.record.host for one in claims if one is not None} == {leader}

    check(checks)
